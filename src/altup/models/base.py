"""What all our models share: loading, starting weights, the head with its loss, and what they return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from altup.core.errors import UserError
from altup.core.pretrained import WHERE, load_config
from altup.kernels.cross_entropy import TokenSums, head_sums, token_sums
from altup.models.config import AltUpConfig
from altup.nn import PartialExperts, coefficient_names
from altup.nn.linear import is_bare

ALIGNED = 8  # numbers that fill 16 bytes in half precision


@dataclass
class SumsOutput:
    """Fields of an output: when labels are given, sums over the tokens that count.

    `loss_sum` is what a training loop differentiates: divided by the tokens of the whole batch it gives the
    same gradient however the batch is cut into pieces.
    """

    loss_sum: Tensor | None = None
    nll_sum: Tensor | None = None
    num_correct: Tensor | None = None
    num_tokens: Tensor | None = None


def loss_fields(sums: TokenSums | None, num_items_in_batch: Tensor | int | None = None) -> dict[str, Any]:
    """`sums` as fields of an output, with the loss: the mean over its tokens, or over `num_items_in_batch`."""
    if sums is None:
        return {}
    number = sums.tokens.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return {
        "loss": sums.loss / number,
        "loss_sum": sums.loss,
        "nll_sum": sums.nll,
        "num_correct": sums.correct,
        "num_tokens": sums.tokens,
    }


def linear_sums(hidden: Tensor, linear: nn.Module, labels: Tensor, z_loss: float) -> TokenSums:
    """`token_sums(linear(hidden), labels, z_loss)`, without holding all logits where `linear` is just its weights.

    hidden: [..., D], labels: [...]. A bias is a column of the weight that meets a 1, among enough zeros to keep
    rows aligned.
    """
    if is_bare(linear):
        return head_sums(hidden, linear.weight, labels, z_loss)  # type: ignore[arg-type]
    if not is_bare(linear, bias=True):
        return token_sums(linear(hidden), labels, z_loss)
    one = F.pad(hidden.new_ones(*hidden.shape[:-1], 1), (0, ALIGNED - 1))
    column = F.pad(linear.bias.unsqueeze(1), (0, ALIGNED - 1))  # type: ignore[operator]
    weight = torch.cat([linear.weight, column], dim=1)  # type: ignore[list-item]
    return head_sums(torch.cat([hidden, one], dim=-1), weight, labels, z_loss)


def as_dict(asked: bool | None, config: PreTrainedConfig) -> bool:
    return bool(config.return_dict if asked is None else asked)


def refuse_attentions(asked: bool | None) -> None:
    if asked:
        raise UserError("output_attentions=True: attention weights are never held here; leave it unset")


class AltUpPreTrainedModel(PreTrainedModel):
    """Loading with errors that name the field, fresh weights, and coefficients that stay float32.

    `reads_blocks` names, by their ends, the parameters that upcycling shares out: those through which K equal
    blocks would otherwise count K times.
    """

    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    reads_blocks: tuple[str, ...] = ()
    lm_head: nn.Module
    _supports_sdpa = True
    _can_compile_fullgraph = True
    # Hugging Face asks by name for what `nn.CoefficientModule` keeps in float32.
    _keep_in_fp32_modules_strict = ["rule", "update", "router"]  # noqa: RUF012

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights other than coefficients, which are float32 in any model."""
        return self.get_input_embeddings().weight.dtype  # type: ignore[return-value]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Modules that know how to start; a model's own `_init_weights` sees to embeddings and linear maps."""
        if hasattr(module, "reset_parameters") and not isinstance(module, nn.Linear | nn.Embedding):
            reset_missing(module)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # For code outside its own tree, Hugging Face skips modules whose parameters all sit in children.
        super()._initialize_weights(module, is_custom_code=False)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        ignore_mismatched_sizes: bool = False,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As Hugging Face's, but weights that do not fit the config are an error that says which field differs,
        unless `ignore_mismatched_sizes` is set."""
        place = pretrained_model_name_or_path
        loaded: Any = super().from_pretrained(
            place, *args, ignore_mismatched_sizes=True, output_loading_info=True, **kwargs
        )
        model, info = loaded
        wrong = [str(key[0]) for key in info["mismatched_keys"]] + sorted(info["missing_keys"])
        if wrong and not ignore_mismatched_sizes:
            where = {name: kwargs[name] for name in WHERE if name in kwargs}
            stored = load_config(place, cls.config_class, **where).to_dict()
            differing = [
                f"{field}={value!r} where the checkpoint has {stored[field]!r}"
                for field, value in model.config.to_dict().items()
                if field in stored and stored[field] != value and field not in ("dtype", "architectures")
                if not field.startswith("_")
            ]
            remedy = (
                f"{'; '.join(differing)}; load it with the config saved beside it"
                if differing
                else f"the file is not whole, or not that of a {cls.__name__}"
            )
            raise UserError(
                f"{place}: {len(wrong)} weights are of another shape or missing, first {wrong[0]}; {remedy}"
            )
        return (model, info) if output_loading_info else model

    def answer(
        self,
        hidden: Tensor,
        labels: Tensor | None,
        return_logits: bool = True,
        num_items_in_batch: Tensor | int | None = None,
    ) -> dict[str, Any]:
        """The head and its loss as fields of an output: `logits` [batch, tokens, vocab_size], unless they are not
        to be returned, and what `loss_fields` makes of `labels` [batch, tokens], where given.

        hidden: [batch, tokens, output_width].
        """
        config: Any = self.config
        logits = sums = None
        if labels is not None and not return_logits:
            sums = linear_sums(*self.head_input(hidden), labels, config.z_loss)
        else:
            logits = self.logits(hidden)
            if labels is not None:
                sums = token_sums(logits, labels, config.z_loss)
        if sums is not None:
            sums = self.with_balance_loss(sums)
        return {"logits": logits if return_logits else None, **loss_fields(sums, num_items_in_batch)}

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def head_input(self, hidden: Tensor) -> tuple[Tensor, nn.Module]:
        """What the head's last linear map reads, and that map."""
        return hidden, self.lm_head

    def with_balance_loss(self, sums: TokenSums) -> TokenSums:
        """Add the experts' mean balance loss, scaled by the tokens as the rest of `loss_sum` is."""
        config: Any = self.config
        if not (self.training and config.experts and config.expert_balance):
            return sums
        experts = [m for m in self.modules() if isinstance(m, PartialExperts)]
        mean = torch.stack([m.balance_loss for m in experts if m.balance_loss is not None]).mean()
        for module in experts:
            module.balance_loss = None
        learns = any(parameter.requires_grad for module in experts for parameter in module.router.parameters())
        if torch.is_grad_enabled() and learns and not mean.requires_grad:
            raise UserError(
                f"expert_balance={config.expert_balance} gets no gradient through reentrant checkpointing; "
                "call gradient_checkpointing_enable({'use_reentrant': False})"
            )
        return sums._replace(loss=sums.loss + config.expert_balance * mean * sums.tokens)


def reset_missing(module: nn.Module) -> None:
    """Initialise a module's parameters, except those that were loaded from a checkpoint."""
    loaded = [(p, p.clone()) for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
    module.reset_parameters()  # type: ignore[operator]
    for parameter, value in loaded:
        parameter.copy_(value)


def empty_like(cls: Any, config: PreTrainedConfig, like: nn.Module) -> Any:
    """A model of the same dtype and device as `like`, in evaluation mode."""
    first: Tensor = next(like.parameters())
    return cls(config).to(first.device, first.dtype).eval()


def refuse_widened(config: AltUpConfig, family: str) -> None:
    """UserError for a model that is to become Hugging Face's and is not dense."""
    if not config.is_plain or config.sequence != "none" or config.experts:
        raise UserError(
            f"widening={config.widening!r}, num_blocks={config.num_blocks}, sequence={config.sequence!r}, "
            f"experts={config.experts}: only a dense {family} fits Hugging Face's class; use save_pretrained"
        )


def refuse_widened_layers(model: PreTrainedModel) -> None:
    """UserError for a Hugging Face model that is to become ours and was widened by `altup.widen`."""
    if coefficient_names(model):
        raise UserError(
            f"{type(model).__name__} was widened by altup.widen, and its coefficients would be lost; give the "
            "original, or altup.narrow it first"
        )
