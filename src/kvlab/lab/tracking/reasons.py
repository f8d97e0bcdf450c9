"""Why a store does not do what was asked, in a sentence that says what would help."""

from __future__ import annotations

import re

from kvlab.lab.settings import without_password

_REASON_CHARS = 400
_OTHER = "; use tracking.uri=sqlite:///<file>, tracking.uri=http://<host>:<port> or tracking=off"
_SCHEMA = re.compile(r"out-of-date database schema \(found version (\w+), but expected (\w+)\)")


def reason(problem: object) -> str:
    """One line of what went wrong, without passwords, library names and stack traces."""
    text = " ".join(str(problem).split())
    text = re.sub(r"\(Background on this error at: \S+\)", "", text)
    text = re.sub(r"^\((?:psycopg2|sqlite3|pymysql)\.\w+\) ", "", text)
    return without_password(text).strip()[:_REASON_CHARS]


def remedy(problem: object, shown: str) -> str:
    """What would help, beginning with a semicolon."""
    text = str(problem)
    if versions := _SCHEMA.search(text):
        if _is_known(versions[1]):
            return f"; after a backup, mlflow db upgrade {shown} brings it up to date"
        return f"; a newer MLflow made it: install that one, or take another store{_OTHER.replace('; use', ':')}"
    if re.search(r"error code 40[13]\b", text):
        return (
            "; the server wants to know who asks: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
            "MLFLOW_TRACKING_TOKEN, to an account that may write there, or use tracking=off"
        )
    if "password authentication failed" in text or "no password supplied" in text:
        return (
            "; put the right user and password into tracking.uri=postgresql://<user>:<password>@<host>/<database>"
        )
    return _OTHER


def _is_known(revision: str) -> bool:
    """Whether this MLflow knows a schema's version; not that of one made by a newer."""
    from pathlib import Path

    import mlflow.store.db_migrations

    folder = Path(mlflow.store.db_migrations.__path__[0]) / "versions"
    return any(file.name.startswith(f"{revision}_") for file in folder.glob("*.py"))
