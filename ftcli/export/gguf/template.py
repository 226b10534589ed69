"""The chat template as programs that serve read it: that of training, without the tags that only training reads."""

from __future__ import annotations

import re

_BEGIN = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")


def served_template(template: str) -> str:
    """``template`` with its generation blocks as blocks that always hold: it renders the same text in any Jinja."""
    return _END.sub(r"{%\1 endif \2%}", _BEGIN.sub(r"{%\1 if true \2%}", template))
