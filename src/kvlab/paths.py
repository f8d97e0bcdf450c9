"""Where kvlab's own files are. Whatever a command writes goes to the working directory instead.

            CONF                SOURCE
checkout    <checkout>/conf     <checkout>
wheel       <package>/conf      None
"""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent

#: The source tree that kvlab runs from; None where it was installed from a wheel.
SOURCE: Path | None = PACKAGE.parents[1] if (PACKAGE.parents[1] / "conf" / "run.yaml").is_file() else None

#: The configuration: a directory for each group, and run.yaml.
CONF = SOURCE / "conf" if SOURCE is not None else PACKAGE / "conf"
