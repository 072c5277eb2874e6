from __future__ import annotations

import pytest

from altup import AltUpT5Config
from altup.models.methods import list_presets


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"widening": "altup", "num_blocks": 0}, "num_blocks=0"),
        ({"widening": "altup", "num_blocks": 2.5}, "num_blocks=2.5"),
        ({"num_blocks": 2}, "num_blocks=2 needs a widening"),
        ({"widening": "wider"}, "widening='wider'"),
        ({"widening": "sum", "num_blocks": 2, "selection": "same"}, "selection='same' does not fit"),
        ({"widening": "altup", "num_blocks": 2, "selection": "random"}, "selection='random'"),
        ({"widening": "altup", "num_blocks": 2, "selection": [0, 1]}, "num_layers=12"),
        ({"widening": "altup", "num_blocks": 2, "selection": [0, 5] * 6}, "from 0 to 1"),
        ({"sequence": "altup", "stride": 0}, "stride=0"),
        ({"stride": 4}, "stride=4 needs sequence"),
        ({"sequence": "strided"}, "sequence='strided'"),
        ({"experts": -1}, "experts=-1"),
        ({"experts": 4, "expert_top_k": 5}, "expert_top_k=5"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"num_heads": 1.5}, "num_heads"),
        ({"d_kv": -64}, "d_kv=-64"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"relative_attention_num_buckets": 7}, "relative_attention_num_buckets=7"),
        ({"relative_attention_max_distance": 8}, "relative_attention_max_distance=8"),
        ({"dropout_rate": 1.0}, "dropout_rate=1.0"),
        ({"feed_forward_proj": "relu"}, "feed_forward_proj='relu'"),
        ({"widening": "sum", "num_blocks": 2, "tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"extra_layers": -1}, "extra_layers=-1"),
        ({"widening": "altup", "num_blocks": "2"}, "num_blocks='2'"),
        ({"layer_norm_epsilon": "1e-6"}, "layer_norm_epsilon='1e-6'"),
        ({"layer_norm_epsilon": -1}, "layer_norm_epsilon=-1"),
        ({"relative_attention_num_buckets": None}, "relative_attention_num_buckets=None"),
        ({"relative_attention_max_distance": "x"}, "relative_attention_max_distance='x'"),
        ({"pad_token_id": None}, "pad_token_id=None"),
        ({"decoder_start_token_id": 40000}, "decoder_start_token_id=40000"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false'"),
        ({"sequence": "altup", "stride": 4, "num_layers": 2}, "at least 3 layers"),
        ({"widening": "altup", "num_block": 2}, "did you mean 'num_blocks'"),
        ({"sites": "sublayer"}, "sites='sublayer' does not fit widening='none'"),
        ({"widening": "x0", "sites": "sublayer"}, "sites='sublayer' does not fit widening='x0'"),
    ],
)
def test_nonsense_gets_an_error_that_names_the_field(fields, says):
    with pytest.raises(ValueError, match=says):
        AltUpT5Config(**fields)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"method": "altupp"}, "'altupp' is not known"),
        ({"size": "huge"}, "size='huge'"),
        ({"method": "altup+recycled"}, "twice"),
        ({"method": "dense", "k": 2}, "k=2 does not fit"),
        ({"method": "altup", "stride": 4}, "stride=4 does not fit"),
        ({"method": "altup", "k": 0}, "k=0 makes no sense"),
        ({"method": None}, "method=None"),
        ({"method": "moe", "experts": 0}, "experts=0"),
        ({"method": "altup", "kk": 4}, "kk=4: there is no such field; did you mean 'k'[?]"),
        ({"dropout_rat": 0.1}, "dropout_rat=0.1: there is no such field; did you mean 'dropout_rate'[?]"),
        ({"metod": "altup"}, "did you mean 'method'[?]"),
        ({"zebra": 2}, "zebra=2: there is no such field; see the fields of AltUpT5Config"),
    ],
)
def test_presets_refuse_nonsense(arguments, says):
    with pytest.raises(ValueError, match=says):
        AltUpT5Config.from_preset(**arguments)


@pytest.mark.parametrize("method", list_presets())
def test_round_trip_through_disk(method, tmp_path):
    config = AltUpT5Config.from_preset("base", method)
    config.save_pretrained(tmp_path)
    assert AltUpT5Config.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_presets_are_the_paper_s():
    assert AltUpT5Config.from_preset("base", "altup").selection == "alternating"
    assert AltUpT5Config.from_preset("base", "sameup").selection == "same"
    recycled = AltUpT5Config.from_preset("base", "recycled", k=4)
    assert (recycled.embedding_width, recycled.output_width, recycled.layer_width) == (768, 768, 768)
    wide = AltUpT5Config.from_preset("base", "dense-wide")
    assert (wide.embedding_width, wide.output_width, wide.layer_width) == (1536, 1536, 1536)
    summed = AltUpT5Config.from_preset("base", "sum")
    assert (summed.embedding_width, summed.output_width, summed.selection) == (1536, 768, None)
    strided = AltUpT5Config.from_preset("base", "sequence-altup")
    assert (strided.stride, list(strided.strided_layers)) == (4, list(range(1, 11)))
    experts = AltUpT5Config.from_preset("base", "altup+moe")
    assert (experts.experts, experts.expert_hidden, experts.expert_top_k) == (128, 16, 1)
