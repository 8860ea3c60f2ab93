"""The base class of the configuration's sections, and the types of their fields."""

import contextlib
import re
import socket
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def _full_ipv4(host: str) -> str:
    """Return a short or octal IPv4 address, such as 127.1, as four numbers; other hosts are returned unchanged.

    The C library resolves such an address, but gRPC and aiohttp refuse it.
    """
    with contextlib.suppress(OSError, ValueError):
        addresses = socket.getaddrinfo(host, None, socket.AF_INET, flags=socket.AI_NUMERICHOST)
        return str(addresses[0][4][0])
    return host


# An address to bind; "" would bind all addresses of the machine.
Host = Annotated[str, Field(min_length=1), AfterValidator(_full_ipv4)]
Port = Annotated[int, Field(ge=0, le=65535)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # limit of torch's CPU generator
LoraTargets = Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)]


def _device(value: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise ValueError("must be cpu, cuda or cuda:N, such as cuda:0")
    return value


Device = Annotated[str, AfterValidator(_device)]


def _compiled(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(
            f"{value!r} is not a regular expression ({error}); give a part of a parameter's name, such as embed_tokens"
        ) from error
    return value


Patterns = tuple[Annotated[str, Field(min_length=1), AfterValidator(_compiled)], ...]
"""Regular expressions that are searched in the names of a model's parameters."""


def _by_device(value: object, info: ValidationInfo) -> object:
    """Resolve `auto`: float32 on a CPU, bfloat16 on a GPU, where its matrix products are about ten times as fast."""
    if value != "auto":
        return value
    return "float32" if info.data.get("device", "cpu") == "cpu" else "bfloat16"


Precision = Annotated[
    Literal["float32", "bfloat16"],
    BeforeValidator(_by_device, json_schema_input_type=Literal["auto", "float32", "bfloat16"]),
    Field(validate_default=True),
]
"""The value of `auto` depends on the section's `device`, which must be declared before a field of this type."""


def _budget_of_device(value: object, info: ValidationInfo) -> object:
    if value is not None:
        return value
    return 1024 if info.data.get("device", "cpu") == "cpu" else 16_384


TokenBudget = Annotated[
    int, BeforeValidator(_budget_of_device, json_schema_input_type=Count), Field(ge=1, validate_default=True)
]
"""The default depends on the section's `device`, which must be declared first."""
BUDGET_OF_DEVICE: Any = None
AUTO_PRECISION: Any = "auto"  # default of a `Precision` field; a validated value is never `auto`


def _kinds(annotation: Any) -> set[Any]:
    """Return the types that a field's annotation allows, also as the items of a list, tuple or dictionary."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kinds(get_args(annotation)[0])
    if origin in (Union, UnionType, tuple, list, dict):
        return {kind for part in get_args(annotation) for kind in _kinds(part)}
    return {annotation}


class Section(BaseModel):
    """Base class of the sections: frozen, unknown keys rejected, field docstrings become descriptions."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, serialize_by_alias=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean(cls, value: object, info: ValidationInfo) -> object:
        """Refuse a boolean for a number, which pydantic would read as 0 or 1."""
        assert info.field_name is not None
        kinds = _kinds(cls.model_fields[info.field_name].annotation)
        values = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
        if any(isinstance(each, bool) for each in values) and kinds & {int, float} and bool not in kinds:
            hint = "; YAML reads yes and no as these, so write them in quotes" if str in kinds else ""
            raise ValueError(f"must be a number, not true or false{hint}")
        return value

    @field_validator("*")
    @classmethod
    def _home(cls, value: Any) -> Any:
        """Expand a leading `~` in paths, as a shell does."""
        return value.expanduser() if isinstance(value, Path) and value.parts[:1] == ("~",) else value


DNS_PREFIX = "dns:"


def _address(value: str) -> str:
    match = re.fullmatch(r"(?:dns:)?(?:[^\s/:@,]+|\[[^\s/@,\]]+\]):([0-9]+)", value)
    if match is None or int(match[1]) > 65535:
        raise ValueError("must be host:port, [IPv6]:port or dns:name:port, with a port of at most 65535")
    host, _, port = value.rpartition(":")
    return f"{_full_ipv4(host)}:{port}"


Address = Annotated[str, AfterValidator(_address)]
"""`host:port` of a server, or `dns:name:port` for every address that the name resolves to."""


def resolve(address: str) -> list[str]:
    """Return the `host:port` of all servers at an address, sorted. A plain `host:port` is returned unchanged.

    Raises:
        OSError: the name cannot be resolved.
        ValueError: the name is malformed.
    """
    if not address.startswith(DNS_PREFIX):
        return [address]
    name, _, port = address.removeprefix(DNS_PREFIX).rpartition(":")
    hosts = sorted({str(item[4][0]) for item in socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)})
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
