"""Reads and writes YAML. It rejects duplicate keys, and reads numbers as in YAML 1.2."""

import re
from collections.abc import Sequence
from typing import Any

import yaml

_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_NUMBERS = {  # the first that matches counts
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)\Z"),
    "tag:yaml.org,2002:float": re.compile(rf"(?:{_FLOAT})\Z"),
}
_TEXT = "tag:yaml.org,2002:str"
_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the numbers of YAML 1.2: `1e-6` is a number; `1:30` (90 in YAML 1.1) is not."""

    def construct_number(self, node: yaml.ScalarNode) -> int:
        """Return an integer. Raises ConstructorError if it has leading zeros: YAML 1.1 reads 010 as 8, 1.2 as 10."""
        if re.match(r"[-+]?0[0-9_]", node.value):
            raise yaml.constructor.ConstructorError(
                problem=f"{node.value} starts with 0, which YAML 1.1 reads as octal; write the number without it, or "
                "a text in quotes",
                problem_mark=node.start_mark,
            )
        return self.construct_yaml_int(node)


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which also quotes the texts that `_Loader` would read as numbers."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag not in _NUMBERS]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    for _reader_or_writer in (_Loader, _Dumper):
        _reader_or_writer.add_implicit_resolver(_tag, _pattern, [*"-+.0123456789"])
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_number)


def read_yaml(text: str) -> Any:
    """Return the content of `text`, a single YAML document; None if it is empty.

    Raises:
        ValueError: the text is not valid YAML, or a key is given twice or is not text; the message names the line.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_keys(node, [])
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        problem = error.problem or error.context
        if "\\t" in str(problem):
            problem = f"{problem}; indent with spaces"
        elif "another document" in str(problem):
            problem = "a second document starts here, which would be ignored; remove one of the two"
        raise ValueError(f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else problem) from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("the values are nested too deeply") from error


def dump_yaml(value: Any) -> str:
    """Return plain values as YAML, from which `read_yaml` and other readers get the same values."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _check_keys(node: yaml.Node, path: Sequence[str], around: Sequence[yaml.Node] = ()) -> None:
    """Raise ValueError if a key below `node` is duplicate or not text, or if an alias is inside its own anchor."""
    if node in around:
        raise ValueError(f"line {node.start_mark.line + 1}: {'.'.join(path)} contains itself; remove its alias")
    around = [*around, node]
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            _check_keys(item, [*path, str(i)], around)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        name = str(key.value)
        where = ".".join([*path, name])
        if key.tag not in (_TEXT, _MERGE):
            kind = key.tag.rpartition(":")[2]
            raise ValueError(
                f"line {line}: the key {where} must be text, but YAML reads it as {kind}; put it in quotes"
            )
        if name in lines:
            remedy = "write <<: [*a, *b]" if key.tag == _MERGE else "keep one of them"
            raise ValueError(f"line {line}: {where} occurs twice, first in line {lines[name]}; {remedy}")
        lines[name] = line
        _check_keys(value, path if key.tag == _MERGE else [*path, name], around)
