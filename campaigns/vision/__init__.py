"""Models of torchvision, timm, open_clip and Lightning, tiny and random, through the pipeline.

`models` makes them, `examine` exports one and has it judged by the zoo's judge, `run` does so for
all, `page` writes docs/results/vision.md. This project does not depend on the packages.
"""
