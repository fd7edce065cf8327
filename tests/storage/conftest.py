from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.storage import peers


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    with peers.moto() as url:
        yield url


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in peers.CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bucket(moto_url: str, request: pytest.FixtureRequest) -> str:
    """A bucket of the test's own."""
    name = "b" + format(abs(hash(request.node.nodeid)) % 10**12, "d")
    peers.client(moto_url).create_bucket(Bucket=name)
    return name
