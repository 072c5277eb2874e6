"""Keys and values in places that never move, so that a token's step can be recorded and replayed.

A layer keeps its last `size` tokens in a ring: the token at place p lies in slot p mod size. For full attention
the ring is as long as the longest text allowed and never goes round; for a sliding window it is the window. Which
slots a token sees follows from p, a number on the device, so the same recording serves every token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from altup.core.errors import UserError
from altup.kernels.cuda_graph import can_record, record, try_recording

ROUND = 64  # lengths are rounded up to this, as attention wants its mask aligned


class FixedLayer(CacheLayerMixin):
    """The ring of one layer. `slots` is the cache's: by size, the slot of the token that is read now."""

    keys: Any
    values: Any

    def __init__(self, size: int, is_sliding: bool, slots: dict[int, Tensor]) -> None:
        super().__init__()
        self.size, self.is_sliding, self.slots = size, is_sliding, slots
        self.seen = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            torch.zeros(*x.shape[:2], self.size, x.shape[-1], dtype=x.dtype, device=x.device)
            for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Of a prompt, keys and values come back as they are; of a token behind it, the whole ring does."""
        if self.is_initialized:
            slots = self.slots[self.size]
            return self.keys.index_copy_(2, slots, key_states), self.values.index_copy_(2, slots, value_states)
        self.lazy_initialization(key_states, value_states)
        self.seen = key_states.shape[2]
        kept = min(self.seen, self.size)
        slots = torch.arange(self.seen - kept, self.seen, device=self.device) % self.size
        self.keys.index_copy_(2, slots, key_states[:, :, -kept:])
        self.values.index_copy_(2, slots, value_states[:, :, -kept:])
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # of the prompt; the masks of later tokens are the cache's own

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return self.size


class FixedCache(Cache):
    """A cache for texts of up to `limit` tokens, which also runs the model that fills it (`run`).

    Args:
        config: Of the text model.
        limit: Tokens of the longest text, prompt included.
    """

    def __init__(self, config: Any, limit: int) -> None:
        self.config, self.limit = config, -(-limit // ROUND) * ROUND
        self.slots: dict[int, Tensor] = {}
        kinds = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
        self.sizes = {"full_attention": self.limit, "sliding_attention": min(config.sliding_window, self.limit)}
        sliding = [kind == "sliding_attention" for kind in kinds]
        self.layers: list[Any]
        super().__init__(
            layers=[FixedLayer(self.sizes[k], s, self.slots) for k, s in zip(kinds, sliding, strict=True)]
        )
        self.release()

    def release(self) -> None:
        """Forget the recording, which holds the cache that holds it."""
        self._inputs: dict[str, Tensor] = {}
        self._step: Callable[[], Any] | None = None
        self._replay: Callable[[], Any] | None = None

    def numbers(self, batch: int) -> int:
        """That it will hold for so many rows."""
        sizes = sum(layer.get_max_length() for layer in self.layers)
        return 2 * batch * self.config.num_key_value_heads * self.config.head_dim * sizes

    def run(self, forward: Callable[..., Any], given: dict[str, Any]) -> Any:
        """`forward(**given)`: the whole prompt first, then one token a row, which is recorded the second time."""
        given = {name: value for name, value in given.items() if name != "past_key_values"}
        read = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
        rows, tokens = read.shape[:2]
        seen = self.get_seq_length()
        if seen + tokens > self.limit or (seen and tokens != 1):
            raise UserError(
                f"a cache of {self.limit} tokens that holds {seen} does not take {tokens} more: after the prompt "
                "it takes one at a time"
            )
        if not seen:
            self.real = torch.ones(rows, self.limit, dtype=torch.bool, device=read.device)
            if isinstance(mask := given.get("attention_mask"), Tensor):
                self.real[:, :tokens] = mask.bool()
            self.place = torch.tensor([tokens], device=read.device)
            return forward(**given, past_key_values=self)
        made = self._run_token(forward, given)
        for layer in self.layers:
            layer.seen += 1
        return made

    def _run_token(self, forward: Callable[..., Any], given: dict[str, Any]) -> Any:
        given.pop("attention_mask", None)
        inputs = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        if self._step is None:
            self._inputs = {name: value.clone() for name, value in inputs.items()}
            settings = {name: value for name, value in given.items() if name not in inputs}

            def step() -> Any:
                positions = {} if "position_ids" in inputs else {"position_ids": self.place[None]}
                given = {**settings, **self._inputs, **positions}
                made = forward(**given, attention_mask=self._masks(), past_key_values=self)
                self.place.add_(1)
                return made

            self._step = step
            return step()  # warms up what is recorded
        for name, value in inputs.items():
            self._inputs[name].copy_(value)
        if self._replay is None:
            self._replay = self._record(self._step)
        return self._replay()

    def _record(self, step: Callable[[], Any]) -> Callable[[], Any]:
        device = self.place.device
        if not can_record(device):
            return step
        warning = "altup.accelerate: this model's step cannot be recorded, so it runs one by one"
        return try_recording(lambda: record(step), device, warning) or step

    def _masks(self) -> dict[str, Tensor]:
        """By kind of attention, 0 for slots that are seen and −∞ for others: [batch, 1, 1, size]. Slot s holds the
        last place p' ≤ p with p' mod size = s, if there was one. As numbers, which every layer would make of
        booleans."""
        masks, dtype = {}, self.layers[0].dtype
        for kind, size in self.sizes.items():
            self.slots[size] = self.place % size
            held = self.place - (self.place - torch.arange(size, device=self.place.device)) % size
            seen = (held >= 0) & self.real.index_select(1, held.clamp(min=0))
            masks[kind] = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -torch.inf)[:, None, None]
        return masks

    def as_dynamic(self) -> DynamicCache:
        """What `generate` gives back: the cache that it would have made."""
        made: Any = DynamicCache(config=self.config)
        for index, layer in enumerate(self.layers):
            seen = layer.get_seq_length()
            places = torch.arange(max(0, seen - layer.size), seen, device=layer.device) % layer.size
            made.update(layer.keys.index_select(2, places), layer.values.index_select(2, places), index)
            if layer.is_sliding:
                made.layers[index].cumulative_length = seen
        return made
