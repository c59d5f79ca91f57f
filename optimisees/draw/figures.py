"""Images of several models side by side."""

from base64 import b64decode
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

from l2lopt.report import style

_WIDTH, _TITLE = 8.0, 0.3
"""Width of a row and height of its title, inches."""


def rows_of_images(strips: Mapping[str, str], folder: Path, name: str) -> list[Path]:
    """Draws a row of images under each label.

    Args:
        strips: Label → images beside one another, as of `pictures.strip`.
        folder: Folder that gets the figure as PNG and SVG.
        name: Name of both files, without its ending.
    """
    rows = {label: np.asarray(Image.open(BytesIO(b64decode(strip)))) for label, strip in strips.items()}
    heights = [_WIDTH * pixels.shape[0] / pixels.shape[1] + _TITLE for pixels in rows.values()]
    with plt.rc_context(style.STYLE):
        figure, panels = plt.subplots(
            len(rows), figsize=(_WIDTH, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
        )
        for panel, (label, pixels) in zip(panels[:, 0], rows.items(), strict=True):
            panel.imshow(pixels, interpolation="nearest")
            panel.set_title(style.shown(label), loc="left", fontsize=10)
            panel.axis("off")
        return style.write_figure(figure, folder, name)
