"""Make a config small by rules about the names of its fields.

Widths are divided by one factor wherever they stand, so that what was equal stays equal and what
divided still divides.  Counts (layers, experts, queries) and lengths are cut to a few.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 131
"""Ids of every text model: a prime, so that no width equals it."""
POSITIONS = 64
WINDOW = 16
LAYERS = 2
GRID = 4
"""Patches along one side of an image."""

# The end of a name that says a field is a width.
_WIDTH = re.compile(
    r"(^|_)(hidden_sizes?|hidden_dims?|d_model|embed_dims?|embedding_dim|embedding_size|dims?"
    r"|intermediate_sizes?|intermediate_dim|ffn_dim|ffn_hidden_size|n_embd|n_inner|d_ff|d_kv"
    r"|d_head|d_inner|head_dim|kv_channels|channels|channel_list|filters|width|widths|rank|units"
    r"|projection_size|bottleneck_size|bottleneck|projector_size|pooler_output_size|inner_dim"
    r"|dim_feedforward|dim_head|d_rel|n_state|state_size|d_state|dim_per_stage"
    r"|latents|codebook_dim|dimension|attention_size|mlp_dim|output_size|out_hidden_size"
    r"|fusion_hidden_size|feat_dim|coordinate_size|shape_size|proj_size|layer_size|emb_size"
    r"|num_features|num_pos_feats|hidden_channels|base_channels|stem_size|block_multiple_of"
    r"|upsample_groups|hidden_size_\w+|intermediate_size_\w+|hidden_size|d_embed|n_groups_dim)$"
)
_NOT_WIDTH = re.compile(
    r"^(num_channels|audio_channels|in_chans|num_input_channels|feature_dim|input_channels"
    r"|mask_time_\w+|query_dim|num_mel_bins|image_dim|patch_dim|input_dim|output_channel_dim)$"
)
_LAYERS = re.compile(
    r"^(num_hidden_layers|num_layers|n_layers?|\w*_layers|depth|\w*_depth|layers|num_hidden_groups"
    r"|num_\w*blocks|num_blocks|decoder_layers|encoder_layers|\w*num_hidden_layers)$"
)
_NOT_LAYERS = re.compile(
    r"(^num_conv_layers|^num_encoder_blocks|shared_layers|residual_layers|no_rope_layers|feat_extract_layers"
    r"|return_\w*layers|random_blocks|encode_proj_layers|subsample_layers|moe_layers"
    r"|mask_token|max_depth|^num_adapter_layers$|max_window_layers|lqe_layers|postnet_layers)"
)
_DEPTHS = re.compile(
    r"^(depths|depth|blocks_per_stage|num_blocks|layers|stage_num_blocks|depth|"
    r"num_hidden_layers|num_block_repeats|stage_numb_of_layers)$"
)
_EXPERTS = re.compile(
    r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_moe_experts"
    r"|ffn_num_experts|moe_num_local_experts|router_num_experts)$"
)
_TOP_EXPERTS = re.compile(
    r"^(num_experts_per_tok|num_experts_per_token|moe_topk|moe_top_k|moe_k|experts_per_token|top_k"
    r"|moe_topk_num)$"
)
_TOKEN = re.compile(r"(token_id|token_ids|token_index|_id|_ids|_idx|_index|start_id|end_id)$")
_POSITIONS = re.compile(
    r"^(max_position_embeddings|n_positions|max_seq_len|max_sequence_length|n_ctx"
    r"|max_target_positions|max_source_positions|max_len|model_max_length|max_length"
    r"|original_max_position_embeddings|max_text_len|max_position|position_embedding_size)$"
)
_WINDOWS = re.compile(
    r"^(sliding_window|attention_chunk_size|local_attention|sliding_window_size|index_topk"
    r"|mamba_chunk_size|chunk_size|attention_window|local_attention_window)$"
)
_LAYER_INDICES = re.compile(
    r"(global_attn_indexes|deepstack_visual_indexes|fullatt_block_indexes|full_attn_idxs"
    r"|global_attention_blocks|out_indices|moe_layers|vision_feature_layer|attn_layer_indices"
    r"|cross_attention_layers|insert_layer_id|intermediate_layers_indices|feature_layers)$"
)
_SECTIONED = (
    "glm4v",
    "glm46v",
    "glm_image",
    "glm_ocr",
    "glmga",
    "paddleocr",
    "qwen2_vl",
    "qwen2_5_vl",
)
_DROPPED = ("id2label", "label2id", "transformers_version", "dtype", "architectures")


@dataclass
class Plan:
    """One way to shrink a config."""

    factor: int
    """Widths are divided by it."""
    layers: int = LAYERS
    tokens: dict[int, int] = field(default_factory=dict)
    """Special ids beyond the vocabulary, and what they became: equal ones stay equal."""

    def width(self, value: int) -> int:
        small = value // self.factor
        return small if value % self.factor == 0 and small >= 1 and value >= 16 else value

    def token(self, value: int) -> int:
        if value < VOCABULARY:
            return value
        return self.tokens.setdefault(value, VOCABULARY - 1 - len(self.tokens))


def shrink(config: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """A smaller copy of a config as `to_dict` gives it, sub-configs included."""
    small: dict[str, Any] = {}
    layers = _layer_count(config)
    for name, value in config.items():
        if name in _DROPPED:
            continue
        if name == "per_layer_config" and isinstance(value, Mapping):
            small[name] = _by_layer(value, plan)
        elif isinstance(value, Mapping):
            small[name] = shrink(value, plan) if _is_config(name, value) else _rope(value, plan)
        else:
            small[name] = _value(name, value, plan, layers)
    _fit_image(small, config)
    _fit_experts(small)
    _fit_heads(small)
    _fit_sections(small)
    if isinstance(config.get("depths"), (list, tuple)) and "num_layers" in config:
        small["num_layers"] = config["num_layers"]  # of stages
    _fit_backbone(small, config, plan)
    return small


def _is_config(name: str, value: Mapping[str, Any]) -> bool:
    return "model_type" in value or name.endswith("_config")


def _rope(value: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Rope parameters, for all layers or by kind of layer."""
    small: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            small[name] = _rope(item, plan)
        elif name == "mrope_section":
            small[name] = _sections(item, plan.factor)
        elif name == "original_max_position_embeddings":
            small[name] = min(item, POSITIONS)
        else:
            small[name] = item
    return small


def _sections(sections: Any, factor: int) -> Any:
    """Thirds of the rotary half; what rounding loses goes to the first."""
    if not isinstance(sections, (list, tuple)):
        return sections
    small = [size // factor for size in sections]
    small[0] += sum(sections) // factor - sum(small)
    return small


def _layer_count(config: Mapping[str, Any]) -> int | None:
    if isinstance(config.get("depths"), (list, tuple)):
        return None  # then `num_layers` counts stages
    for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "layers"):
        if isinstance(config.get(name), int):
            return int(config[name])
    return None


def _value(name: str, value: Any, plan: Plan, layers: int | None) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return _items(name, list(value), plan, layers)
    return _number(name, value, plan) if isinstance(value, int) else value


def _number(name: str, value: int, plan: Plan) -> int:
    if name.startswith("vocab_size") or name.endswith("vocab_size"):
        return value if name == "type_vocab_size" else min(value, VOCABULARY)
    if _LAYER_INDICES.search(name):
        return value if value < 0 else min(value, plan.layers - 1)
    if _TOKEN.search(name) and "size" not in name:
        return plan.token(value)
    if name == "num_kv_shared_layers":
        return 0
    if _EXPERTS.match(name):
        return min(value, 8)
    if _TOP_EXPERTS.match(name):
        return min(value, 2)
    if _LAYERS.match(name) and not _NOT_LAYERS.search(name):
        return min(value, plan.layers)
    if _POSITIONS.match(name):
        return min(value, POSITIONS)
    if _WINDOWS.match(name):
        return min(value, WINDOW)
    if name in ("num_queries", "num_query_tokens"):
        return min(value, 10)
    if _WIDTH.search(name) and not _NOT_WIDTH.match(name):
        return plan.width(value)
    return value


def _items(name: str, values: list[Any], plan: Plan, layers: int | None) -> list[Any]:
    if not values:
        return values
    if _LAYER_INDICES.search(name) and all(isinstance(v, int) for v in values):
        return values if name.endswith("out_indices") else _indices(values, plan)
    if layers is not None and len(values) == layers and layers > plan.layers:
        return _few(values, plan.layers)
    if _DEPTHS.match(name) and all(isinstance(v, int) for v in values):
        return [min(v, 2) if index == 0 else min(v, 1) for index, v in enumerate(values)]
    if all(isinstance(v, (list, tuple)) for v in values):
        return [_items(name, list(v), plan, None) for v in values]
    if _TOKEN.search(name) and all(isinstance(v, int) for v in values):
        return [plan.token(v) for v in values]
    if _WIDTH.search(name) and not _NOT_WIDTH.match(name):
        return [plan.width(v) if isinstance(v, int) else v for v in values]
    return values


def _indices(values: list[int], plan: Plan) -> list[int]:
    """Layers by index: as many of the last ones as there are."""
    return sorted({min(v, plan.layers - 1 - i) for i, v in enumerate(values[: plan.layers])})


def _few(values: list[Any], count: int) -> list[Any]:
    """Of a list with one item a layer, the first of each kind."""
    kinds: list[Any] = []
    for item in values:
        if item not in kinds:
            kinds.append(item)
    if isinstance(values[0], str):
        return [*kinds, *values][:count]
    return values[:count]


def _fit_image(small: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Images of a few patches."""
    patch = config.get("patch_size", config.get("encoder_stride"))
    size = config.get("image_size")
    if not isinstance(patch, int) or patch < 1:
        return
    merged = max(int(config.get("spatial_merge_size") or 1), 1)
    wanted = patch * max(GRID, 2 * merged)
    if patch <= 4:  # hierarchical: windows and later stages divide it further
        wanted = 64
    if isinstance(size, int):
        small["image_size"] = min(size, wanted)
    if isinstance(size, (list, tuple)) and len(size) == 2:
        small["image_size"] = [min(s, wanted) for s in size]


def _by_layer(value: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Settings of single layers by index: those of the first ones named go to the last layers."""
    kept = list(value.values())[: plan.layers - 1]
    return {str(plan.layers - 1 - index): item for index, item in enumerate(kept)}


def _fit_heads(small: dict[str, Any]) -> None:
    """Heads that divide the width; explicit head sizes where a config has none of its own."""
    widths = ("hidden_size", "d_model", "embed_dim", "n_embd", "encoder_hidden_dim")
    width = next((small[name] for name in widths if isinstance(small.get(name), int)), None)
    for name in ("num_attention_heads", "num_heads", "encoder_attention_heads", "n_head"):
        heads = small.get(name)
        if width is None or not isinstance(heads, int) or not heads:
            continue
        if small.get("head_dim") is None and width % heads:
            small[name] = heads = math.gcd(width, heads)
        while "spatial_merge_size" in small and width // heads % 4 and heads % 2 == 0:
            small[name] = heads = heads // 2  # halves of a head are rotated by row and by column
        if "head_dim" in small and small["head_dim"] is None:
            small["head_dim"] = width // heads
        groups = small.get("num_key_value_heads", heads)
        if "num_key_value_heads" in small and (groups is None or heads % groups):
            small["num_key_value_heads"] = heads


def _fit_sections(small: dict[str, Any]) -> None:
    """Rotary sections where the model's code has a default that a small head cannot hold."""
    rope = small.get("rope_parameters")
    heads = small.get("num_attention_heads")
    is_sectioned = str(small.get("model_type", "")).startswith(_SECTIONED)
    if not is_sectioned or not isinstance(rope, dict) or not isinstance(heads, int):
        return
    size = small.get("head_dim") or small["hidden_size"] // heads
    half = int(size * rope.get("partial_rotary_factor", 1.0)) // 2
    rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def _fit_experts(small: dict[str, Any]) -> None:
    """Groups of experts that divide the few there are."""
    for groups, chosen in (("n_group", "topk_group"), ("num_expert_group", "topk_group")):
        if isinstance(small.get(groups), int) and small[groups] > 1:
            small[groups] = 2
            small[chosen] = 1


def _fit_backbone(small: dict[str, Any], config: Mapping[str, Any], plan: Plan) -> None:
    """Stages are numbered by layer in plain backbones: take the last."""
    if "stage_names" not in config or isinstance(config.get("depths"), (list, tuple)):
        return
    stages = len(config["stage_names"]) - 1
    if _layer_count(config) == stages and stages > plan.layers:
        for name in ("stage_names", "out_features", "_out_features", "_out_indices"):
            small.pop(name, None)
        small["out_indices"] = [plan.layers]
