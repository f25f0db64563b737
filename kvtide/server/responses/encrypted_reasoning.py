"""`encrypted_content` of reasoning items: thoughts that come back from clients that store nothing.

Such a client asks for `reasoning.encrypted_content` and sends it in the next turn, without the
text. The prompt then has the thought, and the prefix of the model's own output is found. The
content is the text in base64 behind a mark, no secret: the item has the text beside it. What
another service made cannot be read and is left out.
"""

from __future__ import annotations

import base64

from kvtide.engine import RequestError

INCLUDED = "reasoning.encrypted_content"
"""In `include` of a request."""
MARK = "kvtide-1."


def encrypted(text: str) -> str:
    return MARK + base64.b64encode(text.encode("utf-8", "replace")).decode()


def decrypted(content: object) -> str | None:
    """The text; None for what another service made."""
    if not isinstance(content, str) or not content.startswith(MARK):
        return None
    try:
        return base64.b64decode(content.removeprefix(MARK), validate=True).decode()
    except ValueError:
        raise RequestError(
            "the encrypted_content of a reasoning item is damaged; send it as it came, or leave "
            "the item out",
            param="input",
        ) from None
