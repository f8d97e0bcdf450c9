"""Settings with secrets, and where these are found again: all of them have a mark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
from PIL import Image

from tests.support.commands import Command

MARK = "51c0ffee"  # in every secret
ENVIRONMENT = {
    "MLFLOW_TRACKING_PASSWORD": f"mlflow-{MARK}",
    "MLFLOW_TRACKING_TOKEN": f"mlflow-token-{MARK}",
    "AWS_ACCESS_KEY_ID": f"aws-id-{MARK}",
    "AWS_SECRET_ACCESS_KEY": f"aws-{MARK}",
    "HF_TOKEN": f"hf_{MARK}",
    "PLAIN_NAME": f"plain-{MARK}",
    "SHORT": "q9#z!",
    "DATABASE": f"postgresql://user:database-{MARK}@db.host/kvlab",
}
#: Settings with secrets, written and from the environment, that change nothing of what a run does.
SECRETS = (
    "run_name=${oc.env:PLAIN_NAME}",
    "model.name=${oc.env:PLAIN_NAME}",
    "workload.name=named-${oc.env:HF_TOKEN}",
    "+tags.origin=${oc.env:PLAIN_NAME}",
    "+tags.same=of ${tags.origin}",
    "+tags.short=${oc.env:SHORT}",
    "+tags.database=${oc.env:DATABASE}",
    f"+tags.api_token=written-{MARK}",
    f"+tags.link='https://user:link-{MARK}@git.host/a?x=1&access_token=query-{MARK}'",
    "+model.architecture.note=${oc.env:HF_TOKEN}",
)


def texts(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Every file as its bytes and, of those that are compressed, its content."""
    for file in (file for file in folder.rglob("*") if file.is_file()):
        name = str(file.relative_to(folder))
        yield name, name.encode() + file.read_bytes()
        if file.suffix == ".parquet":
            yield name, repr(pq.read_table(file).to_pylist()).encode()
        if file.suffix == ".png":
            with Image.open(file) as image:
                yield name, repr(image.info).encode()


def found_in(text: bytes) -> str:
    """Where the mark is, with what is around it; empty where it is not."""
    at = text.find(MARK.encode())
    return "" if at < 0 else repr(text[max(0, at - 60) : at + 20])


def check(folder: Path, *commands: Command) -> None:
    leaks = {name: found_in(text) for name, text in texts(folder)}
    leaks |= {f"output {number}": found_in(each.output.encode()) for number, each in enumerate(commands)}
    found = {name: leak for name, leak in leaks.items() if leak}
    assert not found, found
