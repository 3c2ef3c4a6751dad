"""What is done to a text before it is tokenized: cleaned, put into a template."""

import html
import re
from typing import Protocol

from enginecast.runtime.bundle.manifest import Clean

_SPACE = re.compile(r"\s+")
_QUOTED = re.compile(r'"(.*?)"|“(.*?)”')


class HasForm(Protocol):
    """What has the fields of `manifest.TextForm`."""

    @property
    def template(self) -> str: ...
    @property
    def clean(self) -> Clean: ...
    @property
    def keep_end(self) -> bool: ...


def prepare_text(form: HasForm, text: str) -> tuple[str, str]:
    """What is tokenized: the text cleaned, in its place in the template; and what is tokenized by
    itself behind it, and never cut.
    """
    before, after = form.template.split("{}")
    text = f"{before}{clean_text(form.clean, text)}"
    return (text, after) if form.keep_end else (f"{text}{after}", "")


def clean_text(how: Clean, text: str) -> str:
    """Clean a text the way that a family of pipelines does (diffusers 0.42.1).

    * "none": nothing; Flux, Stable Diffusion 3, CogVideoX.
    * "strip": white space at both ends.
    * "lower-strip": `text.lower().strip()`, as PixArt, Sana and DeepFloyd IF do unless they are
      asked for `clean_caption=True`, which this does not do.
    * "whitespace": HTML entities resolved twice, then each run of white space made one space, and
      none left at the ends: `prompt_clean` of Wan where ftfy is not installed.  Where it is,
      `prompt_clean` repairs mis-decoded characters and curly quotes first: such texts have other
      token ids then.
    * "empty-is-space": a space in place of the empty text, as Hunyuan Video 1.5 has it.
    * "quoted": what stands in quotation marks, each once, as `Text "A". Text "B". `, which is what
      Hunyuan Video 1.5 gives ByT5; empty where nothing does.
    """
    if how == "empty-is-space":
        return text or " "
    if how == "quoted":
        found = dict.fromkeys(one or other for one, other in _QUOTED.findall(text))
        return "".join(f'Text "{one}". ' for one in found)
    if how == "strip":
        return text.strip()
    if how == "lower-strip":
        return text.lower().strip()
    if how == "whitespace":
        return _SPACE.sub(" ", html.unescape(html.unescape(text))).strip()
    return text
