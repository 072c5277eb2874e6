"""Inputs for each modality of a model, found by trying shapes that its config suggests until it takes them.

The marks that stand for features among the tokens are made as many as its error message asks for.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from tiny_models import VOCABULARY
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel


def inputs_of(model: PreTrainedModel, seed: int) -> dict[str, dict[str, Any]]:
    """By name, each modality that the model takes and, as "all", those together; an error where it takes none."""
    return Inputs(model, seed).find()


def redrawn(inputs: dict[str, dict[str, Any]], seed: int) -> dict[str, dict[str, Any]]:
    """Others of the same shapes, with the tokens that stand for something where they were."""
    draws = torch.Generator().manual_seed(seed)

    def drawn(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or "mask" in name:
            return value
        if value.is_floating_point() and "patches" not in name:
            return torch.randn(value.shape, generator=draws)
        if name.endswith("input_ids"):
            other = torch.randint(3, 30, value.shape, generator=draws)
            return torch.where((value >= 3) & (value < 90), other, value)
        return value

    return {kind: {name: drawn(name, value) for name, value in given.items()} for kind, given in inputs.items()}


class Inputs:
    """The search for arguments that a model takes."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self.model = model
        self.draws = torch.Generator().manual_seed(seed)
        self.arguments = inspect.signature(model.forward).parameters
        self.config = model.config
        self.error: Exception = ValueError("no inputs")
        self.most = 0  # arguments that were given when it was raised

    def find(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        text = list(self.text())
        if works := self.first(text):
            found["text"] = works
        for name, variants in (("image", self.images()), ("video", self.videos()), ("audio", self.sounds())):
            variants = [given | self.decoded() for given in variants]
            texts = [found["text"]] if "text" in found else text[:2]
            marked = [self.with_marks(each, name) | given for given in variants for each in texts]
            if works := self.first(marked if "text" in found else [*marked, *variants]):
                found[name] = works
        if not found:
            found = {"other": works} if (works := self.first(list(self.others()))) else {}
        if not found:
            raise self.error
        together = [name for name in found if name != "text"]
        if len(together) > 1 and "input_ids" in self.arguments:
            parts = [found[name]["input_ids"] for name in together if "input_ids" in found[name]]
            whole = {key: value for name in together for key, value in found[name].items()}
            if len(parts) == len(together):
                whole["input_ids"] = torch.cat([parts[0], *(part[:, 1:] for part in parts[1:])], dim=1)
                whole |= self.kinds(whole["input_ids"])
            if works := self.first([whole]):
                found["all"] = works
        return found

    def first(self, tries: list[dict[str, Any]]) -> dict[str, Any] | None:
        for given in tries:
            if works := self.mended(given):
                return works
        return None

    def mended(self, given: dict[str, Any]) -> dict[str, Any] | None:
        """`given` with as many marks for features as the model asks for, if it runs."""
        for _ in range(5):
            try:
                with torch.no_grad():
                    torch.manual_seed(0)
                    self.model(**given)
                return given
            except MemoryError:
                raise
            except Exception as error:
                if len(given) > self.most:
                    self.error, self.most = error, len(given)
                new = self.repaired(given, str(error))
                if new is None:
                    return None
                given = new
        return None

    def repaired(self, given: dict[str, Any], message: str) -> dict[str, Any] | None:
        counts = re.search(r"tokens:? (\d+), *features:? *(\d+)", message)
        if counts and "input_ids" in given:
            have, need = map(int, counts.groups())
            width = self.model.get_input_embeddings().weight.shape[-1]
            need = need // width if need > 3000 and need % width == 0 else need  # some count numbers, not rows
            kind = next((k for k in ("image", "video", "audio") if k in message.lower()), "image")
            ids = given["input_ids"]
            mark = self.mark(kind)
            places = (ids[0] == mark).nonzero()
            if mark is None or have == need or not len(places) or need > 5000:
                return None
            count = max(1, len(places) * need // have) if have else need
            first, last = int(places[0]), int(places[-1])
            row = torch.cat([ids[0, :first], torch.full((count,), mark), ids[0, last + 1 :]])
            return given | {"input_ids": row[None]} | self.kinds(row[None])
        missing = re.search(
            r"missing \d+ required positional arguments?: '(\w+)'|`(\w+)` cannot be `None`", message
        )
        name = missing and (missing[1] or missing[2])
        if name and name not in given and (value := self.extra(name)) is not None:
            return given | {name: value}
        return None

    # Texts

    def text(self) -> Iterator[dict[str, Any]]:
        if "input_ids" not in self.arguments:
            return
        size = self.look("vocab_size", default=VOCABULARY)
        size = size if isinstance(size, int) else 30
        ids = torch.randint(3, max(4, min(size, 90)), (1, 12), generator=self.draws)
        given = {"input_ids": ids} | self.named("bbox", "xpath_tags_seq", "xpath_subs_seq")
        end = getattr(self.config, "eos_token_id", None)
        if "decoder_input_ids" in self.arguments:
            yield given | {"decoder_input_ids": ids[:, :7]}
            codebooks = self.look("num_codebooks", default=4)
            yield given | {"decoder_input_ids": ids[:, :7].repeat(codebooks, 1)}
        yield given
        if isinstance(end, int):
            yield given | {"input_ids": torch.cat([ids[:, :-1], torch.tensor([[min(end, size - 1)]])], dim=1)}
        for count in {self.look("num_codebooks", default=8), 8, 9}:
            yield {"input_ids": torch.randint(3, 30, (1, 6, count), generator=self.draws)}
            yield {"input_ids": torch.randint(3, 30, (1, count, 6), generator=self.draws)}

    def mark(self, kind: str) -> int | None:
        names = [f"{kind}_token_id", f"{kind}_token_index"]
        if kind == "image":
            names += ["media_placeholder_token_id", "image_pad_token_id", "vision_token_id"]
        for name in names:
            if isinstance(found := self.look(name), int):
                return found
        return None

    def with_marks(self, text: dict[str, Any], kind: str) -> dict[str, Any]:
        mark = self.mark(kind)
        if mark is None or text["input_ids"].dim() != 2:
            return text
        start = next((s for n in (f"{kind}_start_token_id", "vision_start_token_id") if (s := self.look(n))), None)
        ids = text["input_ids"]
        middle = [mark] if not isinstance(start, int) else [start, mark]
        ids = torch.cat([ids[:, :2], torch.tensor([middle]), ids[:, 2:]], dim=1)
        return text | {"input_ids": ids} | self.kinds(ids)

    def kinds(self, ids: Tensor) -> dict[str, Tensor]:
        """Which tokens stand for what, where a model wants to be told."""
        told = {}
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in self.arguments and self.mark("image") is not None:
                told[name] = torch.zeros_like(ids, dtype=torch.int if name.startswith("mm") else torch.long)
                for number, kind in enumerate(("image", "video", "audio"), 1):
                    if name.startswith("mm") or kind == "image":
                        mark = self.mark(kind)
                        told[name][ids == (-1 if mark is None else mark)] = number
        return told

    def decoded(self) -> dict[str, Any]:
        if "input_ids" in self.arguments or "decoder_input_ids" not in self.arguments:
            return {}
        return {"decoder_input_ids": torch.randint(3, 60, (1, 6), generator=self.draws)}

    # Images, videos, sounds

    def images(self) -> Iterator[dict[str, Any]]:
        for name in ("pixel_values", "pixels", "image_pixel_values", "image"):
            if name not in self.arguments:
                continue
            height, width = self.size()
            channels = self.look("num_channels", "in_channels", "in_chans", default=3)
            channels = channels if isinstance(channels, int) else 3
            extra = self.named("image_sizes", "pixel_mask", "high_res_pixel_values", "qformer_input_ids")
            for shape in ((1, channels, height, width), (1, 1, channels, height, width)):
                yield {name: self.noise(*shape)} | extra
                yield {name: self.noise(*shape)}
            yield from self.patches(name, "image_grid_thw", 1)
            yield {name: self.noise(1, 3, channels, height, width)} | extra
            yield {name: self.noise(1, 1, 4, channels, height, width)} | self.named(
                "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask"
            )
            frames = self.look("num_frames", "frames_per_clip", default=4)
            yield {name: self.noise(1, frames, channels, height, width)} | extra
        if "flattened_patches" in self.arguments:
            for width in (768, self.look("patch_embed_hidden_size", default=768)):
                row_and_column = torch.ones(1, 16, 2)
                yield {"flattened_patches": torch.cat([row_and_column, self.noise(1, 16, width)], dim=-1)}

    def videos(self) -> Iterator[dict[str, Any]]:
        if "pixel_values_videos" in self.arguments:
            height, width = self.size()
            frames = self.look("num_frames", "frames_per_clip", default=4)
            yield {"pixel_values_videos": self.noise(1, frames, 3, height, width)}
            yield from self.patches("pixel_values_videos", "video_grid_thw", 2)

    def patches(self, name: str, grid: str, frames: int) -> Iterator[dict[str, Any]]:
        """Images as rows of patches, with the size of their grid beside them."""
        patch = self.look("patch_size", default=14)
        patch = patch if isinstance(patch, int) else patch[0]
        merge = self.look("spatial_merge_size", "merge_size", "merge_kernel_size", default=2)
        side = 2 * (merge if isinstance(merge, int) else merge[0])
        channels = self.look("in_channels", "num_channels", "in_chans", default=3)
        time = self.look("temporal_patch_size", default=1)
        count = frames * side * side
        for place in (grid, "grid_thw", "image_grid_hws", "spatial_shapes", "grid_hws", "target_sizes"):
            if place not in self.arguments:
                continue
            sizes = [[frames, side, side]] if "thw" in place else [[side, side]]
            for shape in (
                (count, channels * time * patch * patch),
                (count, channels * patch * patch),
                (count, channels, patch, patch),
                (1, count, channels * patch * patch),
            ):
                yield {name: self.noise(*shape), place: torch.tensor(sizes)} | self.named("pixel_attention_mask")
                if "pixel_attention_mask" in self.arguments:
                    mask = torch.ones(1, count, dtype=torch.long)
                    yield {name: self.noise(*shape), place: torch.tensor(sizes), "pixel_attention_mask": mask}
        places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), dim=-1)
        for place in ("image_position_ids", "pixel_position_ids"):
            if place in self.arguments and name == "pixel_values":
                rows = self.noise(1, side * side, channels * patch * patch)
                yield {name: rows, place: places.reshape(1, -1, 2)}

    def sounds(self) -> Iterator[dict[str, Any]]:
        bins = self.look("num_mel_bins", "feature_size", "input_feat_per_channel", "mel_dim", "n_mels", default=80)
        positions = self.look("max_source_positions", default=100)
        for name in ("input_features", "audio_input_features", "input_audio"):
            if name in self.arguments:
                for shape in (
                    (1, bins, 2 * positions),
                    (1, 200, bins),
                    (1, 200, self.look("input_dim", "feature_projection_input_dim", default=160)),
                    (1, bins, 200),
                    (1, 1, self.look("spec_size", default=256), bins),
                ):
                    for mask in ("input_features_mask", "feature_attention_mask", "attention_mask"):
                        frames = shape[1] if shape[1] != bins else shape[2]
                        if mask in self.arguments and mask != "attention_mask":
                            yield {name: self.noise(*shape), mask: torch.ones(1, frames, dtype=torch.long)}
                    yield {name: self.noise(*shape)}
        for name in ("input_values", "audio_values"):
            if name in self.arguments:
                frames = self.look("max_length", default=1024)
                with_text = self.named("decoder_input_values")
                for shape in ((1, 4000), (1, 1, 9600), (1, frames, bins), (1, 1, 24_000), (1, 16_000)):
                    yield {name: self.noise(*shape)} | with_text

    def others(self) -> Iterator[dict[str, Any]]:
        """Series, hidden states and codes."""
        width = self.look("hidden_size", "d_model", default=64)
        length = self.look("context_length", default=64)
        channels = self.look("num_input_channels", "input_size", default=1)
        if "past_values" in self.arguments:
            lags = max(self.look("lags_sequence", default=[0]) or [0])
            past = self.noise(1, length + lags, channels) if channels > 1 else self.noise(1, length + lags)
            time = {"past_time_features": self.noise(1, length + lags, self.look("num_time_features", default=0))}
            future = self.look("prediction_length", default=8)
            time["future_time_features"] = self.noise(1, future, self.look("num_time_features", default=0))
            time = {name: value for name, value in time.items() if name in self.arguments}
            yield {"past_values": past, "past_observed_mask": torch.ones_like(past)} | time | self.named("freq")
            yield {"past_values": self.noise(1, length, channels)}
            yield {"past_values": self.noise(1, length)} | self.named("freq")
        for name in ("inputs_embeds", "hidden_states", "encoder_hidden_states"):
            if name in self.arguments:
                yield from self.patches(name, "grid_thw", 1)
                yield {name: self.noise(1, 9, width)}
        for name in ("query_embeds", "inputs"):
            if name in self.arguments:
                yield {name: self.noise(1, 9, width)} | self.named("encoder_hidden_states")
                yield {name: self.noise(1, 9, width)}

    # Small parts

    def named(self, *names: str) -> dict[str, Any]:
        """Those of the named arguments that the model has."""
        made = {name: self.extra(name) for name in names if name in self.arguments}
        return {name: value for name, value in made.items() if value is not None}

    def extra(self, name: str) -> Any:
        height, width = self.size()
        if name == "bbox":
            return torch.tensor([[[1, 2, 9, 8]] * 12])
        if name in ("image_sizes", "target_sizes", "original_sizes"):
            return torch.tensor([[height, width]])
        if name == "pixel_mask":
            return torch.ones(1, height, width, dtype=torch.long)
        if name == "high_res_pixel_values":
            size = getattr(getattr(self.config, "high_res_vision_config", None), "image_size", height)
            return self.noise(1, 3, size, size)
        if name in ("qformer_input_ids", "decoder_input_ids", "char_input_ids"):
            return torch.randint(3, 60, (1, 6), generator=self.draws)
        if name == "aspect_ratio_ids":
            return torch.ones(1, 1, dtype=torch.long)
        if name == "aspect_ratio_mask":
            return torch.ones(1, 1, 4, dtype=torch.long)
        if name == "cross_attention_mask":
            return None
        if name in ("xpath_tags_seq", "xpath_subs_seq"):
            return torch.ones(1, 12, self.look("max_depth", default=50), dtype=torch.long)
        if name == "freq":
            return torch.zeros(1, 1, dtype=torch.long)
        if name == "decoder_input_values":
            return self.noise(1, 10, self.look("num_mel_bins", default=80))
        if name == "codebook_idx":
            return 2
        if name == "visual_feats":
            return self.noise(1, 5, self.look("visual_feat_dim", default=64))
        if name == "visual_pos":
            return self.noise(1, 5, 4).abs()
        if name == "encoder_hidden_states":
            return self.noise(1, 5, self.look("encoder_hidden_size", "hidden_size", "d_model", default=64))
        return None

    def size(self) -> tuple[int, int]:
        size = self.look("image_size", "input_size", default=64)
        if isinstance(size, dict):
            size = (size.get("height", 64), size.get("width", 64))
        return (size, size) if isinstance(size, int) else tuple(size[:2])  # type: ignore[return-value]

    def look(self, *names: str, default: Any = None) -> Any:
        """The first of the fields that is set, in the config or one inside it."""
        waiting: list[Any] = [self.config]
        configs = []
        while waiting:
            config = waiting.pop(0)
            configs.append(config)
            waiting += [each for each in vars(config).values() if isinstance(each, PreTrainedConfig)]
        for name, config in itertools.product(names, configs):
            if (value := getattr(config, name, None)) is not None:
                return value
        return default

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(math.prod(shape), generator=self.draws).reshape(shape)
