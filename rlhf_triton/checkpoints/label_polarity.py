"""Reads from the name of a label whether it means good or bad."""

import re

GOOD = re.compile("correct|right|good|pos(itive)?|yes|true|accept(ed)?|chosen|pass(ed)?|valid|safe|1")
BAD = re.compile("incorrect|wrong|bad|neg(ative)?|no|false|reject(ed)?|fail(ed)?|invalid|unsafe|error|0")
SIGNS = {"+": True, "+1": True, "-": False, "-1": False}
FILLERS = ("label", "class", "step", "is")  # words that do not change the meaning of a label's name


def is_good(label: str) -> bool | None:
    """Return whether a label's name means good (True) or bad (False); None if it is unclear."""
    words = [word for word in re.findall(r"[^\W\d_]+|\d+", label.casefold()) if word not in FILLERS]
    is_negated = len(words) > 1 and words[0] in ("not", "non")
    names_by_meaning = {True: GOOD, False: BAD}
    meant = [
        good for good, names in names_by_meaning.items() if len(words) == 1 + is_negated and names.fullmatch(words[-1])
    ]
    return SIGNS.get(label.strip(), meant[0] != is_negated if meant else None)
