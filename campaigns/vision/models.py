"""The models, each by a factory: `vision.models:NAME`, as the command takes it.

Random weights, with norms whose statistics are those of random images, so that values neither die
out nor grow; sizes are as small as each architecture takes.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

FAINT = 1e-2
"""Parameters that are smaller, all of them, are drawn anew: zeros, and scales of branches."""
Options = dict[str, Any]
Made = tuple[nn.Module, dict[str, Tensor]]


@dataclass(frozen=True)
class Entry:
    """One model, and how it is exported."""

    family: str
    package: str
    """What it needs."""
    build: Callable[[], Made]
    options: tuple[str, ...] = ()
    """Of the export."""
    fp16: bool = True


def settled(model: nn.Module, example: Mapping[str, Tensor], seed: int = 0) -> nn.Module:
    """The model in eval mode, with perturbed weights and statistics of its own on random inputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.abs().max() < FAINT:  # a scale of almost nothing hides what it scales
                parameter.copy_(0.2 + noise * 0.1)
            else:
                parameter.add_(noise * 0.02 * (parameter.std() if parameter.numel() > 1 else 1))
        norms = [
            part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)
        ]
        model.eval()
        for norm in norms:
            norm.train()
            norm.momentum = None
        if norms:
            model(**example)
    return model.eval()


def image(make: Callable[..., nn.Module], name: str = "x", size: int = 64, **options: Any) -> Made:
    """A model of a batch of images."""
    torch.manual_seed(0)
    model = make(**options)
    example = {name: torch.randn(2, 3, size, size)}
    return settled(model, example), example


def of(package: str, path: str) -> Any:
    """An attribute of a module, imported now."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"{package}.{module}" if module else package), name)


def classifier(name: str, size: int = 64, **options: Any) -> Made:
    make = of("torchvision", f"models.{name}")
    return image(make, size=size, weights=None, num_classes=10, **options)


def patches() -> Made:
    make = of("torchvision", "models.VisionTransformer")
    sizes: Options = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4}
    return image(make, size=32, hidden_dim=32, mlp_dim=64, num_classes=10, **sizes)


def several_axes() -> Made:
    make = of("torchvision", "models.MaxVit")
    sizes: Options = {
        "input_size": (64, 64),
        "stem_channels": 16,
        "partition_size": 2,
        "head_dim": 8,
    }
    blocks: Options = {
        "block_channels": [16, 32],
        "block_layers": [1, 1],
        "stochastic_depth_prob": 0.0,
    }
    return image(make, num_classes=10, **sizes, **blocks)


def windows(block: str) -> Made:
    """Windows that are shifted in the second block."""
    make = of("torchvision", "models.SwinTransformer")
    more: dict[str, Any] = {"block": of("torchvision", f"models.swin_transformer.{block}")}
    if block.endswith("V2"):
        more["downsample_layer"] = of("torchvision", "models.swin_transformer.PatchMergingV2")
    sizes: Options = {
        "patch_size": [4, 4],
        "embed_dim": 24,
        "depths": [2, 1],
        "num_heads": [2, 4],
    }
    return image(make, window_size=[4, 4], num_classes=10, **sizes, **more)


def next_convolutions() -> Made:
    make = of("torchvision", "models.ConvNeXt")
    setting = of("torchvision", "models.convnext.CNBlockConfig")
    return image(make, block_setting=[setting(16, 32, 1), setting(32, None, 1)], num_classes=10)


def segmentation(name: str) -> Made:
    make = of("torchvision", f"models.segmentation.{name}")
    key = "input" if name.startswith("lraspp") else "x"
    return image(make, key, weights=None, weights_backbone=None, num_classes=5)


class Flow(nn.Module):
    """Optical flow with few updates."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        found: Tensor = self.model(first, second, num_flow_updates=2)[-1]
        return found


def flow() -> Made:
    torch.manual_seed(0)
    example = {name: torch.rand(1, 3, 128, 128) * 2 - 1 for name in ("first", "second")}
    return settled(Flow(of("torchvision", "models.optical_flow.raft_small")()), example), example


def video(name: str, frames: int = 8, size: int = 32, **options: Any) -> Made:
    torch.manual_seed(0)
    model = of("torchvision", f"models.video.{name}")(weights=None, num_classes=10, **options)
    example = {"x": torch.randn(2, 3, frames, size, size)}
    return settled(model, example), example


class Detector(nn.Module):
    """A detector of one image: its boxes, labels and scores.

    In TorchScript, torchvision's detectors return their losses, too, and in front.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        found = self.model([image])
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return found[1][0]  # type: ignore[no-any-return]
        else:  # TorchScript compiles what comes after a return
            return found[0]  # type: ignore[no-any-return]


class Backbone(nn.Module):
    """Two convolutions, which halve an image thrice."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 7, stride=4, padding=3)
        self.second = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.out_channels = channels

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))))


SMALL = {"min_size": 64, "max_size": 96}
PROPOSALS = {"rpn_pre_nms_top_n_test": 40, "rpn_post_nms_top_n_test": 16}


def detector(name: str, **options: Any) -> Made:
    """A detector with a tiny backbone, whose scores depend on the image."""
    torch.manual_seed(0)
    detection = importlib.import_module("torchvision.models.detection")
    anchors = importlib.import_module("torchvision.models.detection.anchor_utils")
    kinds = ((16, 32),)
    options["num_classes"] = 4
    if name != "FCOS":
        key = "anchor_generator" if name == "RetinaNet" else "rpn_anchor_generator"
        options[key] = anchors.AnchorGenerator(kinds, ((0.5, 1.0, 2.0),))
    else:
        options["anchor_generator"] = anchors.AnchorGenerator(((16,),), ((1.0,),))
    if "RCNN" in name:
        pool = of("torchvision", "ops.MultiScaleRoIAlign")
        options["box_roi_pool"] = pool(["0"], 7, 2)
        options |= PROPOSALS
    if name == "MaskRCNN":
        options["mask_roi_pool"] = pool(["0"], 14, 2)
    if name == "KeypointRCNN":
        options["keypoint_roi_pool"] = pool(["0"], 14, 2)
        options["num_keypoints"] = 3
        options["num_classes"] = 2
    made = getattr(detection, name)(Backbone(32), **SMALL, **options)
    return _found_by(made)


SPREADS = {
    "cls_logits": 2.0,
    "cls_score": 2.0,
    "bbox_ctrness": 1.0,
    "bbox_reg": 0.5,
    "bbox_pred": 0.3,
}
"""Standard deviation of what the last layers of a detector give, by how their paths end."""


def _found_by(made: nn.Module, size: int = 64, spreads: Mapping[str, float] = SPREADS) -> Made:
    """A detector whose scores and boxes depend on the image: torchvision's random weights give the
    same score everywhere, up to rounding.

    Args:
        spreads: standard deviation of what layers give, by how their paths end.
    """
    example = {"image": torch.rand(3, size, size)}
    last = [
        (part, spread)
        for path, part in made.named_modules()
        for end, spread in spreads.items()
        if f".{path}".endswith(f".{end}")
    ]
    detector = Detector(made.eval()).eval()
    with torch.no_grad():
        for part, spread in last:  # what proposes regions comes before what looks at them
            seen: list[Tensor] = []
            hook = part.register_forward_hook(lambda _, __, found, seen=seen: seen.append(found))
            detector(torch.randn(3, size, size))  # as large as inputs of a comparison
            hook.remove()
            assert isinstance(part.bias, Tensor)
            part.bias.zero_()
            part.weight.mul_(spread / torch.cat([each.flatten() for each in seen]).std())
    return detector, example


def with_pyramid() -> Made:
    torch.manual_seed(0)
    make = of("torchvision", "models.detection.fasterrcnn_mobilenet_v3_large_320_fpn")
    sizes = {"rpn_pre_nms_top_n_test": 40, "rpn_post_nms_top_n_test": 16, "box_score_thresh": 0.3}
    made = make(weights=None, weights_backbone=None, num_classes=4, **SMALL, **sizes)
    settled(made.backbone.body, {"x": torch.randn(4, 3, 64, 64)})
    return _found_by(made)


class _WithHead(nn.Module):
    """A detector's layers, without what it does to images and boxes."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = detector.backbone, detector.head

    def forward(self, images: Tensor) -> Any:
        assert callable(self.backbone)
        assert callable(self.head)
        return self.head(list(self.backbone(images).values()))


def single_shot() -> Made:
    torch.manual_seed(0)
    make = of("torchvision", "models.detection.ssdlite320_mobilenet_v3_large")
    made = make(
        weights=None,
        weights_backbone=None,
        num_classes=4,
        topk_candidates=20,
        score_thresh=0.975,
    )
    settled(_WithHead(made), {"images": torch.randn(4, 3, 320, 320)})  # it resizes to 320
    levels = range(len(made.head.classification_head.module_list))
    spreads = {f"classification_head.module_list.{level}.1": 2.0 for level in levels}
    spreads |= {f"regression_head.module_list.{level}.1": 0.5 for level in levels}
    return _found_by(made, spreads=spreads)


OF_ANY_NUMBER = ("--dynamic", "boxes:0=1..32")


class Regions(nn.Module):
    """Pools regions of a feature map, and suppresses boxes that overlap.

    Corners may be any numbers: boxes without an area would have equal scores, whose order in each
    backend is up to its rounding.
    """

    def __init__(self, pool: str) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 8, 3, padding=1)
        self.score = nn.Linear(8 * 9, 1)
        self.pool = of("torchvision", f"ops.{pool}")
        self.suppress = of("torchvision", "ops.nms")

    def forward(self, x: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
        corners = boxes.sigmoid() * 32
        low, high = corners[:, :2], corners[:, 2:]
        boxes = torch.cat([torch.minimum(low, high), torch.maximum(low, high) + 1], 1)
        pooled = self.pool(self.features(x), [boxes], 3, 0.5)
        scores = self.score(pooled.flatten(1))[:, 0]
        keep = self.suppress(boxes, scores, 0.5)
        return boxes[keep], scores[keep]


def regions(pool: str) -> Made:
    torch.manual_seed(0)
    boxes = torch.randn(12, 4)
    return Regions(pool).eval(), {"x": torch.randn(1, 3, 16, 16), "boxes": boxes}


def of_timm(name: str, size: int = 64, **options: Any) -> Made:
    return image(of("timm", "create_model"), size=size, model_name=name, num_classes=10, **options)


def clip(part: str) -> Made:
    torch.manual_seed(0)
    vision = {"image_size": 32, "layers": 2, "width": 64, "head_width": 16, "patch_size": 8}
    text = {"context_length": 12, "vocab_size": 99, "width": 32, "heads": 4, "layers": 2}
    make = of("open_clip", "CoCa" if part == "coca" else "CLIP")
    more: dict[str, Any] = {}
    if part == "coca":
        more["multimodal_cfg"] = {**text, "layers": 2}
        vision |= {"attentional_pool": True, "attn_pooler_heads": 4, "output_tokens": True}
        text |= {"embed_cls": True, "output_tokens": True}
    model = make(32, vision_cfg=vision, text_cfg=text, **more).eval()
    if part == "coca":  # which leaves it as memory was
        torch.nn.init.normal_(model.text_decoder.text_projection, std=0.2)
    pictures = {"image": torch.randn(2, 3, 32, 32)}
    texts = {"text": torch.randint(1, 98, (2, 12))}
    if part in ("whole", "coca"):
        return settled(model, {**pictures, **texts}), {**pictures, **texts}
    method = "encode_image" if part == "image" else "encode_text"
    return Tower(
        settled(model, {**pictures, **texts}), method
    ), pictures if part == "image" else texts


class Tower(nn.Module):
    """One of the two encoders."""

    def __init__(self, model: nn.Module, method: str) -> None:
        super().__init__()
        self.model: Any = model
        name = "image" if method == "encode_image" else "text"
        self.forward = self._image if name == "image" else self._text

    def _image(self, image: Tensor) -> Tensor:
        found: Tensor = self.model.encode_image(image)
        return found

    def _text(self, text: Tensor) -> Tensor:
        found: Tensor = self.model.encode_text(text)
        return found


def lightning() -> Made:
    from vision.lightning_module import loaded

    return loaded(), {"x": torch.randn(3, 3, 16, 16)}


_CLASSIFIERS: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "mobilenet_v2": {},
    "mobilenet_v3_small": {},
    "mnasnet0_5": {},
    "efficientnet_b0": {},
    "densenet121": {},
    "googlenet": {"init_weights": False, "aux_logits": False},
    "inception_v3": {"size": 96, "init_weights": False, "aux_logits": False},
    "regnet_y_400mf": {},
    "shufflenet_v2_x0_5": {},
    "squeezenet1_1": {},
}
_DETECTORS: Mapping[str, Callable[[], Made]] = {
    "faster_rcnn": partial(detector, "FasterRCNN", box_score_thresh=0.5),
    "faster_rcnn_fpn": with_pyramid,
    "mask_rcnn": partial(detector, "MaskRCNN", box_score_thresh=0.5),
    "keypoint_rcnn": partial(detector, "KeypointRCNN", box_score_thresh=0.5),
    "retinanet": partial(detector, "RetinaNet", score_thresh=0.88, topk_candidates=30),
    "fcos": partial(detector, "FCOS", score_thresh=0.7, topk_candidates=30),
    "ssdlite": single_shot,
}
"""Of one image size: scripts of torchvision resize by a factor in fp32, to 63 pixels where eager
makes 64 of 50 or 67.
"""
_TORCHVISION = {
    **{
        name: Entry("classification", "torchvision", partial(classifier, name, **options))
        for name, options in _CLASSIFIERS.items()
    },
    "vision_transformer": Entry("classification", "torchvision", patches),
    "convnext": Entry("classification", "torchvision", next_convolutions),
    "swin": Entry("classification", "torchvision", partial(windows, "SwinTransformerBlock")),
    "swin_v2": Entry("classification", "torchvision", partial(windows, "SwinTransformerBlockV2")),
    "max_vit": Entry("classification", "torchvision", several_axes),
    **{
        name: Entry("segmentation", "torchvision", partial(segmentation, name))
        for name in ("deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
    },
    "raft_small": Entry("optical flow", "torchvision", flow, fp16=False),
    "r3d_18": Entry("video", "torchvision", partial(video, "r3d_18"), fp16=False),
    **{
        f"regions_{name}": Entry(
            "regions", "torchvision", partial(regions, f"roi_{name}"), OF_ANY_NUMBER, fp16=False
        )
        for name in ("align", "pool")
    },
    **{
        name: Entry("detection", "torchvision", make, fp16=False)
        for name, make in _DETECTORS.items()
    },
}
_OF_TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 3},
    "deit3_small_patch16_224": {"img_size": 64, "depth": 2},
    "eva02_tiny_patch14_224": {"size": 56, "img_size": 56, "depth": 3},
    "beit_base_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 96, "num_heads": 4},
    "hiera_tiny_224": {"size": 224, "embed_dim": 24, "stages": (1, 1, 2, 1)},
    "convnext_atto": {},
    "mobilenetv4_conv_small": {},
    "efficientvit_b0": {},
    "repvit_m0_9": {},
    "edgenext_xx_small": {},
    "levit_128s": {"size": 224},
    "poolformer_s12": {},
    "mixer_s16_224": {"img_size": 64},
    "ghostnetv2_100": {},
    "tinynet_e": {},
    "tiny_vit_5m_224": {},
    "mambaout_femto": {},
    "cait_xxs24_224": {"img_size": 64, "depth": 2},
}
_TIMM = {
    f"timm_{name.partition('.')[0]}": Entry("timm", "timm", partial(of_timm, name, **options))
    for name, options in _OF_TIMM.items()
}
_OTHERS = {
    **{
        f"clip_{part}": Entry("open_clip", "open_clip", partial(clip, part))
        for part in ("image", "text", "whole", "coca")
    },
    "lightning_checkpoint": Entry("lightning", "lightning", lightning),
}
ENTRIES: Mapping[str, Entry] = {**_TORCHVISION, **_TIMM, **_OTHERS}


@cache
def made(name: str) -> Made:
    """The model of an entry, made once in a process."""
    return ENTRIES[name].build()


def __getattr__(name: str) -> Callable[[], Made]:
    if name in ENTRIES:
        return partial(made, name)
    raise AttributeError(name)
