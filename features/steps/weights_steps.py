"""Checkpoints on disk: written by transformers, damaged by us, read by kvlab."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from pytest_bdd import given, parsers, then, when
from safetensors.torch import load_file, save_file

from features.steps.checkpoints import Checkpoint, random_tokens, read_decoder
from features.steps.model_steps import Reading
from features.steps.support import MemorySize
from kvlab.errors import WeightsError
from kvlab.models.decoder import Decoder


@dataclass
class Files:
    """A checkpoint's directory, and ways to damage it."""

    model: Checkpoint
    directory: Path

    @property
    def shards(self) -> list[Path]:
        return sorted(self.directory.glob("*.safetensors"))

    def tensors(self) -> dict[str, Path]:
        """Each stored tensor's file."""
        return {name: file for file in self.shards for name in load_file(file)}

    def put(self, name: str, tensor: torch.Tensor | None) -> None:
        """Store a tensor, or with None take it out; the index is kept true."""
        file = self.tensors().get(name, self.shards[-1])
        content = {**load_file(file), name: tensor}
        save_file({key: value.contiguous() for key, value in content.items() if value is not None}, file)
        index = self.directory / "model.safetensors.index.json"
        if index.exists():
            known = json.loads(index.read_text())
            known["weight_map"] = {key: path.name for key, path in self.tensors().items()}
            index.write_text(json.dumps(known))

    def get(self, name: str) -> torch.Tensor:
        """A stored tensor."""
        return load_file(self.tensors()[name])[name]

    def read(self) -> Decoder:
        """kvlab's decoder with these weights."""
        return read_decoder(self.model.config, self.directory)


@given("its checkpoint written as one file", target_fixture="files")
def one_file(model: Checkpoint, tmp_path: Path) -> Files:
    model.reference.save_pretrained(tmp_path)
    files = Files(model, tmp_path)
    assert [file.name for file in files.shards] == ["model.safetensors"]
    return files


@given(parsers.parse("its checkpoint written as shards of {size:d} kB"), target_fixture="files")
def in_shards(model: Checkpoint, tmp_path: Path, size: int) -> Files:
    model.reference.save_pretrained(tmp_path, max_shard_size=f"{size}KB")
    files = Files(model, tmp_path)
    assert len(files.shards) >= 3
    return files


@given(parsers.parse('"{name}" is taken out'))
def taken_out(files: Files, name: str) -> None:
    assert name in files.tensors()
    files.put(name, None)


@given(parsers.parse('a copy of "{like}" is stored as "{name}"'))
def stored_copy(files: Files, like: str, name: str) -> None:
    assert name not in files.tensors()
    files.put(name, files.get(like).clone())


@given(parsers.parse('"{name}" has the shape {shape}'))
def misshapen(files: Files, name: str, shape: str) -> None:
    assert name in files.tensors()
    files.put(name, torch.zeros(json.loads(shape)))


@given(parsers.parse('the file "{name}" is lost'))
def file_lost(files: Files, name: str) -> None:
    (file,) = [file for file in files.shards if file.name.startswith(name)]
    file.unlink()


@when("the checkpoint is read", target_fixture="problem")
def read_checkpoint(files: Files) -> str:
    with pytest.raises(WeightsError) as refused:
        files.read()
    return str(refused.value)


@then(parsers.parse("the checkpoint has {article} output layer of its own"))
def output_layer(files: Files, article: str) -> None:
    assert ("lm_head.weight" in files.tensors()) == (article == "an")


@then("its logits are those of transformers")
def reads_right(files: Files) -> None:
    prompt = random_tokens(40, seed=0)
    pool = MemorySize(4, 16, paged=True).build(files.model.config.kv_spec("float32"))
    reading = Reading(files.model, pool, decoder=files.read())
    reading.add(prompt)
    reading.step([len(prompt)])
    logits = torch.stack([reading.texts[0].logits[position] for position in range(len(prompt))])
    torch.testing.assert_close(logits, files.model.logits(prompt), atol=5e-5, rtol=0.0)


@then(parsers.parse('it is refused, naming "{name}" as {what}'))
def refused_naming_a_tensor(problem: str, name: str, what: str) -> None:
    said = {"missing": "is missing", "having no place": "no place", "not there": "not there", "neither": "neither"}
    assert name in problem
    assert said[what] in problem


@then(parsers.parse('it is refused, naming "{name}" with shape {found} where {needed} is needed'))
def refused_shape(problem: str, name: str, found: str, needed: str) -> None:
    assert f"{name} has shape {found}" in problem
    assert f"needs {needed}" in problem
