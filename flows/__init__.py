"""The Prefect flows, each readable as a table of contents, and the `ebft` command."""
