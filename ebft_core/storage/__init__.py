"""Files outside of the workspace: a folder or S3 behind one interface. Imports no torch, and boto3 late."""
