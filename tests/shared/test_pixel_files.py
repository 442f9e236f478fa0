"""What the files of a pipeline say about sizes, and the nearest size that is possible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.pixel_files import FAMILIES, MOST_PIXELS, MOST_SIDE, PixelFiles
from shared.pooling_files import PoolingFiles, task_of
from tests.api_server.pixels.conftest import files_of

SD3 = "StableDiffusion3Pipeline"
_FAMILY = FAMILIES[SD3]


def test_a_pipeline_paints(tmp_path: Path) -> None:
    files_of(tmp_path)
    assert task_of(tmp_path) == "paint"
    assert PoolingFiles.read(tmp_path).tokenizer_source == str(tmp_path / "tokenizer")


def test_sizes_follow_from_the_vae_and_the_denoiser(tmp_path: Path) -> None:
    usual = PixelFiles.read(files_of(tmp_path / "a"))
    assert (usual.scale, usual.multiple, usual.default_size, usual.longest_prompt) == (2, 8, (32, 32), 77)
    patched = PixelFiles.read(files_of(tmp_path / "b", SD3, patch_size=2, sample_size=None))
    assert (patched.multiple, patched.default_size, patched.longest_prompt) == (4, (256, 256), 77)
    uneven = PixelFiles.read(files_of(tmp_path / "c", sample_size=[16, 24]))
    assert uneven.default_size == (32, 48)


@pytest.mark.parametrize(("patches", "longest"), [({}, 96 * 4), ({"pos_embed_max_size": 192}, 192 * 4)])
def test_a_side_has_no_more_patches_than_the_denoiser_knows(
    tmp_path: Path, patches: dict[str, int], longest: int
) -> None:
    files = PixelFiles.read(files_of(tmp_path, SD3, patch_size=2, **patches))
    assert files.longest_side == longest
    assert files.nearest_size(5000, 64) == (longest, 64)
    assert PixelFiles.read(files_of(tmp_path / "unet")).longest_side == MOST_SIDE


@pytest.mark.parametrize(
    ("schedule", "most", "default"),
    [({}, 200, 50), ({"num_train_timesteps": 1000}, 200, 50), ({"original_inference_steps": 40}, 40, 40)],
)
def test_steps_are_those_of_the_schedule(tmp_path: Path, schedule: dict[str, int], most: int, default: int) -> None:
    files_of(tmp_path)
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps({"_class_name": "X"} | schedule))
    files = PixelFiles.read(tmp_path)
    assert (files.most_steps, files.default_steps) == (most, default)


def test_a_checkpoint_names_the_steps_and_the_guidance_that_suit_it(tmp_path: Path) -> None:
    files_of(tmp_path)
    own = tmp_path / "generation_config.json"
    own.write_text(json.dumps({"num_inference_steps": 6, "guidance_scale": 1.5}))
    files = PixelFiles.read(tmp_path)
    assert (files.default_steps, files.default_guidance) == (6, 1.5)
    own.write_text("{}")
    files = PixelFiles.read(tmp_path)
    assert (files.default_steps, files.default_guidance) == (50, 7.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_inference_steps", 0), ("num_inference_steps", 2.5), ("guidance_scale", "2"), ("guidance_scale", 51)],
)
def test_wrong_defaults_are_refused(tmp_path: Path, name: str, value: object) -> None:
    files_of(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ValueError, match=f"{name} in generation_config.json"):
        PixelFiles.read(tmp_path)


def test_a_long_text_encoder_reads_more(tmp_path: Path) -> None:
    files_of(tmp_path, SD3)
    path = tmp_path / "model_index.json"
    for named, tokens in (([None, None], 77), (["transformers", "T5EncoderModel"], 256)):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"text_encoder_3": named}))
        assert PixelFiles.read(tmp_path).longest_prompt == tokens


@given(st.integers(0, 20_000), st.integers(0, 20_000), st.sampled_from([8, 16, 64]))
def test_the_nearest_size_is_possible_and_its_own_nearest(height: int, width: int, multiple: int) -> None:
    files = PixelFiles(
        "", "", _FAMILY, {}, {"patch_size": multiple, "pos_embed_max_size": 4096}, {"block_out_channels": [8]}, {}, {}
    )
    nearest = files.nearest_size(height, width)
    assert all(side % multiple == 0 and 0 < side <= MOST_SIDE for side in nearest)
    assert nearest[0] * nearest[1] <= MOST_PIXELS
    assert files.nearest_size(*nearest) == nearest
    if max(height, width) <= 2048 - multiple:
        assert all(
            abs(side - wanted) <= max(multiple / 2, multiple - wanted)
            for side, wanted in zip(nearest, (height, width), strict=True)
        )


def test_broken_pipelines_are_named(tmp_path: Path) -> None:
    files_of(tmp_path)
    (tmp_path / "vae" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"vae/config\.json .* is missing"):
        PixelFiles.read(tmp_path)
    (tmp_path / "vae" / "config.json").write_text('{"latent_channels": 4}')
    with pytest.raises(ValueError, match="its class is not supported"):
        PixelFiles.read(tmp_path)
    (tmp_path / "model_index.json").write_text("[")
    with pytest.raises(ValueError, match=r"model_index\.json cannot be read"):
        task_of(tmp_path)
