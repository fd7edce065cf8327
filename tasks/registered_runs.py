"""Which runs have a model in the registry: `ebft gc` keeps them."""

from __future__ import annotations

from pathlib import Path

from ebft_core.config.redaction import redact_text
from ebft_core.errors import UserError

RUN_KEY = "ebft.run_key"
_PAGE = 1000


def registered_runs(uri: str) -> frozenset[str]:
    """Run keys of all versions of all registered models; none if the database has not been made yet.

    Raises:
        UserError: MLflow does not answer: nothing is removed on a guess.
    """
    file = Path(uri.removeprefix("sqlite:///"))
    if uri.startswith("sqlite:///") and not file.exists():
        return frozenset()
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    from tasks.mlflow_store import fail_quickly

    fail_quickly()
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    keys: set[str] = set()
    token = None
    try:
        while True:
            page = client.search_model_versions(max_results=_PAGE, page_token=token)
            keys |= {version.tags[RUN_KEY] for version in page if RUN_KEY in version.tags}
            token = page.token
            if not token:
                return frozenset(keys)
    except MlflowException as error:
        raise UserError(
            "the registry does not answer, so it is not known which models it holds",
            where="tracking.mlflow_uri",
            value=redact_text(uri),
            hint="start MLflow, or give up what it holds with --set retention.keep_registered=false",
        ) from error
