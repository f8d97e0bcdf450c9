from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvlab.errors import WeightsError
from kvlab.models.weight_sources import open_weights
from kvlab.models.weights import DigestedWeights, DummyWeights, SafetensorsWeights


def dummy(seed: int = 0, dtype: torch.dtype = torch.float32) -> DummyWeights:
    return DummyWeights(dtype, "cpu", seed)


class TestDummyWeights:
    @pytest.mark.parametrize("shape", [(1, 1), (7, 13), (300, 64)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_have_the_shape_and_type_asked_for(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        weight = dummy(dtype=dtype).take("a.weight", shape)
        assert (tuple(weight.shape), weight.dtype) == (shape, dtype)
        assert weight.is_contiguous()

    def test_norm_weights_are_ones(self) -> None:
        assert torch.equal(dummy().take("norm.weight", (64,)), torch.ones(64))

    def test_norm_weights_that_are_added_to_one_are_zeros(self) -> None:
        weights = open_weights("dummy", torch.float32, "cpu", norm_weight=0.0)
        assert torch.equal(weights.take("norm.weight", (64,)), torch.zeros(64))

    def test_biases_are_small_but_there(self) -> None:
        bias = dummy().take("q_proj.bias", (1000,))
        assert float(bias.std()) == pytest.approx(0.1, rel=0.1)
        assert (bias != 0).all()

    def test_the_same_seed_gives_the_same_tensors(self) -> None:
        first, second = dummy(seed=3), dummy(seed=3)
        for shape in ((64, 32), (32,), (16, 64)):
            assert torch.equal(first.take("x", shape), second.take("x", shape))

    def test_another_seed_gives_others(self) -> None:
        assert not torch.equal(dummy(seed=3).take("x", (64, 32)), dummy(seed=4).take("x", (64, 32)))

    def test_no_two_tensors_are_alike(self) -> None:
        weights = dummy()
        tensors = [weights.take(f"layer.{index}", (8, 8)) for index in range(100)]
        assert len({tuple(tensor.flatten().tolist()) for tensor in tensors}) == 100

    @pytest.mark.parametrize("shape", [(2000, 64), (1024, 3072), (2100, 1024)])
    def test_no_two_rows_are_equal(self, shape: tuple[int, int]) -> None:
        """In tensors larger than the tile of random numbers too."""
        weights = dummy()
        weights.take("first", (1, 1))  # so that the next one begins inside the tile
        weight = weights.take("x", shape)
        assert len(torch.unique(weight[:, :8], dim=0)) == shape[0]

    def test_are_normal_with_the_deviation_of_an_initialised_model(self) -> None:
        weight = dummy().take("x", (1500, 1500))  # more than two tiles
        assert float(weight.mean()) == pytest.approx(0, abs=2e-4)
        deviation = 1500**-0.5
        assert float(weight.std()) == pytest.approx(deviation, rel=0.01)
        assert float((weight.abs() < deviation).float().mean()) == pytest.approx(0.683, abs=0.01)
        assert not (weight == 0).any()

    def test_nothing_is_left_over(self) -> None:
        dummy().finish()

    def test_are_what_the_word_dummy_opens(self) -> None:
        opened = open_weights("dummy", torch.float32, "cpu", seed=5)
        assert torch.equal(opened.take("x", (4, 4)), dummy(seed=5).take("x", (4, 4)))


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.randn(4, 3), "b.weight": torch.randn(2, 4), "norm.weight": torch.randn(3)}


def save_shards(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Each tensor in a file of its own."""
    weight_map = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        file = f"model-{index:05}.safetensors"
        save_file({name: tensor}, directory / file)
        weight_map[name] = file
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


class TestDigest:
    @staticmethod
    def digest(seed: int = 0, name: str = "b", shape: tuple[int, ...] = (300, 64)) -> str:
        source = DigestedWeights(dummy(seed))
        for each in ("a", name):
            source.take(each, shape)
        return source.digest

    def test_is_that_of_names_shapes_and_numbers(self) -> None:
        digests = [self.digest(), self.digest(seed=1), self.digest(name="c"), self.digest(shape=(64, 300))]
        assert len(set(digests)) == 4
        assert self.digest() == digests[0]

    def test_changes_with_the_last_tensor_alone(self, tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
        found = set()
        for step in range(2):
            changed = dict(tensors)
            last = max(changed)
            changed[last] = changed[last] + step
            save_file(changed, tmp_path / "model.safetensors")
            weights = DigestedWeights(SafetensorsWeights(tmp_path, torch.bfloat16, "cpu"))
            for name, tensor in tensors.items():
                assert torch.equal(weights.take(name, tuple(tensor.shape)), changed[name].bfloat16())
            weights.finish()
            found.add(weights.digest)
        assert len(found) == 2


class TestSafetensors:
    @pytest.mark.parametrize("sharded", [False, True])
    def test_gives_the_tensors_of_one_file_or_of_shards(
        self, tmp_path: Path, tensors: dict[str, torch.Tensor], sharded: bool
    ) -> None:
        if sharded:
            save_shards(tmp_path, tensors)
        else:
            save_file(tensors, tmp_path / "model.safetensors")
        weights = open_weights(str(tmp_path), torch.bfloat16, "cpu")
        for name, tensor in tensors.items():
            assert torch.equal(weights.take(name, tuple(tensor.shape)), tensor.bfloat16())
        weights.finish()

    def test_a_missing_tensor_is_named(self, tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, tmp_path / "model.safetensors")
        weights = SafetensorsWeights(tmp_path, torch.float32, "cpu")
        with pytest.raises(WeightsError, match=r"tensor c\.weight \[4, 3\] is missing"):
            weights.take("c.weight", (4, 3))

    def test_many_left_over_are_counted(self, tmp_path: Path) -> None:
        save_file({f"t{index}": torch.zeros(1) for index in range(9)}, tmp_path / "model.safetensors")
        with pytest.raises(WeightsError, match="t0, t1, t2, t3, t4 and 4 more"):
            SafetensorsWeights(tmp_path, torch.float32, "cpu").finish()

    @pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
    def test_what_the_model_computes_itself_may_be_left_over(self, tmp_path: Path, name: str) -> None:
        save_file({name: torch.zeros(2)}, tmp_path / "model.safetensors")
        SafetensorsWeights(tmp_path, torch.float32, "cpu").finish()

    def test_a_tensor_is_a_copy_of_the_file(self, tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, tmp_path / "model.safetensors")
        weights = SafetensorsWeights(tmp_path, torch.float32, "cpu")
        weights.take("a.weight", (4, 3)).zero_()
        assert torch.equal(weights.take("a.weight", (4, 3)), tensors["a.weight"])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("number", [float("nan"), -float("nan"), float("inf"), -float("inf"), "largest"])
    def test_a_number_that_is_not_finite_is_refused(
        self, tmp_path: Path, dtype: torch.dtype, number: float | str
    ) -> None:
        """Whatever its sign and its neighbours; the largest numbers that are finite are taken."""
        most = torch.finfo(dtype).max
        tensor = torch.tensor([[-1.0, most, -most], [0.0, -0.0, 1.0]]).to(dtype)
        if isinstance(number, float):
            tensor[1, 1] = number
        save_file({"a": tensor}, tmp_path / "model.safetensors")
        weights = SafetensorsWeights(tmp_path, dtype, "cpu")
        if number == "largest":
            assert torch.equal(weights.take("a", (2, 3)), tensor)
        else:
            with pytest.raises(WeightsError, match="tensor a holds numbers that are not finite in"):
                weights.take("a", (2, 3))

    def test_a_number_too_large_for_the_dtype_asked_for_is_refused(self, tmp_path: Path) -> None:
        save_file({"a": torch.tensor([65_504.0, 70_000.0])}, tmp_path / "model.safetensors")
        with pytest.raises(WeightsError, match=r"tensor a holds numbers that are not finite in torch\.float16"):
            SafetensorsWeights(tmp_path, torch.float16, "cpu").take("a", (2,))


class TestMultimodal:
    @pytest.fixture
    def weights(self, tmp_path: Path, tensors: dict[str, torch.Tensor]) -> SafetensorsWeights:
        inside = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        save_shards(tmp_path, inside | {"vision_tower.a.weight": torch.zeros(2)})
        return SafetensorsWeights(tmp_path, torch.float32, "cpu")

    def test_the_language_models_tensors_have_their_usual_names(
        self, weights: SafetensorsWeights, tensors: dict[str, torch.Tensor]
    ) -> None:
        for name, tensor in tensors.items():
            assert torch.equal(weights.take(name, tuple(tensor.shape)), tensor)
        weights.finish()

    def test_one_left_over_is_named(self, weights: SafetensorsWeights) -> None:
        weights.take("a.weight", (4, 3))
        with pytest.raises(WeightsError, match=r"no place for tensor\(s\) b\.weight, norm\.weight$"):
            weights.finish()


class TestBrokenCheckpoints:
    def test_a_directory_without_weights(self, tmp_path: Path) -> None:
        with pytest.raises(WeightsError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
            open_weights(str(tmp_path), torch.float32, "cpu")

    @pytest.mark.parametrize("text", ["", "{}", '{"weight_map": 3}', "[]", '{"weight_map": {"a": 3}}'])
    def test_an_index_that_is_none(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(WeightsError, match="not an index of safetensors shards"):
            open_weights(str(tmp_path), torch.float32, "cpu")

    @pytest.mark.parametrize("content", [b"", b"not a safetensors file at all"])
    def test_a_file_that_is_none(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(WeightsError, match="not a readable safetensors file"):
            open_weights(str(tmp_path), torch.float32, "cpu")
