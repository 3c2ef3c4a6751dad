"""Draw docs/results/peers.png from benchmarks/results/peers.json; needs the extra `bench`.

A panel for each row: speed over eager, with the range of the middle eight tenths of the rounds.
"""

import json

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from peers_page import RESULTS, ROOT, columns

COLORS = {"enginecast": "#c44e52", "products": "#bbbbbb"}
OTHER = "#4c72b0"


def main() -> None:
    rows = json.loads((RESULTS / "peers.json").read_text(encoding="utf-8"))["rows"]
    figure, panels = pyplot.subplots(
        len(rows), 1, figsize=(7, 2.6 * len(rows)), layout="constrained", squeeze=False
    )
    for panel, (case, row) in zip(panels[:, 0], rows.items(), strict=True):
        names = [name for name in columns(rows) if name in row["speed"]][::-1]
        speeds = [row["speed"][name] for name in names]
        ranges = [row["spread"][name] for name in names]
        low = [max(0, speed - low) for speed, (low, _) in zip(speeds, ranges, strict=True)]
        high = [max(0, high - speed) for speed, (_, high) in zip(speeds, ranges, strict=True)]
        colors = [COLORS.get(name.split()[0], OTHER) for name in names]
        panel.barh(names, speeds, xerr=[low, high], color=colors, ecolor="#555555")
        panel.axvline(1, color="black", linewidth=0.8)
        panel.set_title(case, fontsize=10)
        panel.tick_params(labelsize=8)
    panels[-1, 0].set_xlabel("times as fast as eager fp32, one thread")
    figure.savefig(ROOT / "docs" / "results" / "peers.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
