"""The heads of Hugging Face's Gemma 3n: soft-capped logits, cross-entropy and their gradient in chunks of tokens.

A vocabulary of 262,144 makes logits that are larger than any other activation. In training, with labels, nobody
asks for them, so they are never held whole: `logits` of the output is None. Otherwise the head is as it was.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nCausalLMOutputWithPast

from altup.kernels import head_sums
from altup.kernels.cross_entropy import IGNORED
from altup.kernels.gemma3n import uses_kernels
from altup.models.gemma3n.fixed_cache import FixedCache
from altup.models.gemma3n.generation import RecordedGeneration
from altup.models.gemma3n.parts import Fused
from altup.models.gemma3n.small_maps import is_bare


class FusedHead(RecordedGeneration, Fused):
    """Mixed into a model with a head. `fuses_head` is the user's choice: `altup.accelerate(model, head=False)`."""

    fuses_head: bool
    lm_head: Any
    names: tuple[str, ...]  # of the arguments of `forward`, in order

    def forward(self, *args: Any, **given: Any) -> Any:
        """The signature that others see is that of the class it is mixed into."""
        given |= dict(zip(self.names, args, strict=False))
        if isinstance(cache := given.get("past_key_values"), FixedCache):
            return cache.run(super().forward, given)
        if not self._skips_logits(given):
            return super().forward(**given)
        labels = given.pop("labels")
        for name in ("logits_to_keep", "return_dict"):
            given.pop(name, None)
        if given.get("use_cache") is None:  # which the config has on, for `generate`
            given["use_cache"] = False
        body = self._body(given)
        return self._output(body, self._loss(body.last_hidden_state, labels, **given))

    def _body(self, given: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _output(self, body: Any, loss: Any) -> Any:
        raise NotImplementedError

    def obstacle(self) -> str | None:
        model: Any = self
        if not self.fuses_head:
            return "head=False was asked for"
        if not is_bare(self.lm_head):
            return "lm_head: an adapter, a hook or a bias"
        return None if model.loss_function is ForCausalLMLoss else "the model has another loss_function"

    def _skips_logits(self, given: dict[str, Any]) -> bool:
        keep, as_dict = given.get("logits_to_keep", 0), given.get("return_dict")
        return (
            self.training
            and torch.is_grad_enabled()
            and given.get("labels") is not None
            and isinstance(keep, int)
            and keep == 0
            and (self.config.return_dict if as_dict is None else as_dict)
            and given.get("ignore_index", IGNORED) == IGNORED
            and self.obstacle() is None
            and (self.implementation == "plain" or uses_kernels(self.implementation, 2, self.lm_head.weight))
        )

    def _loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        num_items_in_batch: Any = None,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Of the next token: the mean over labels that count, or their sum over `num_items_in_batch`."""
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        hidden = hidden.to(self.lm_head.weight.device)  # of a model that is spread over devices
        targets = shift_labels.reshape(hidden.shape[:-1]).to(hidden.device)
        cap = self.config.get_text_config().final_logit_softcapping
        sums = head_sums(hidden, self.lm_head.weight, targets, softcap=cap, implementation=self.implementation)
        if num_items_in_batch is None:
            return sums.loss / sums.tokens
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(hidden.device)
        return sums.loss / num_items_in_batch


class FusedTextHead(FusedHead):
    """`Gemma3nForCausalLM`."""

    def _body(self, given: dict[str, Any]) -> Any:
        model: Any = self
        return model.model(**given)

    def _output(self, body: Any, loss: Any) -> Any:
        return CausalLMOutputWithPast(
            loss=loss,
            past_key_values=body.past_key_values,
            hidden_states=body.hidden_states,
            attentions=body.attentions,
        )


class FusedMultimodalHead(FusedHead):
    """`Gemma3nForConditionalGeneration`."""

    def _body(self, given: dict[str, Any]) -> Any:
        model: Any = self
        return model.model(**given, return_dict=True)

    def _output(self, body: Any, loss: Any) -> Any:
        return Gemma3nCausalLMOutputWithPast(
            loss=loss,
            past_key_values=body.past_key_values,
            hidden_states=body.hidden_states,
            attentions=body.attentions,
            image_hidden_states=body.image_hidden_states,
            audio_hidden_states=body.audio_hidden_states,
        )
