"""Tags as text. Whatever comes from data passes through `escape`; only `Markup` is taken as it is. PURE."""

from html import escape as _escape


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Part = str | float | int | Markup


def escape(value: Part) -> Markup:
    """As text inside a tag or an attribute."""
    return value if isinstance(value, Markup) else Markup(_escape(str(value), quote=True))


def join(*parts: Part, by: str = "") -> Markup:
    return Markup(by.join(escape(part) for part in parts))


def tag(name: str, *parts: Part, **attributes: Part | bool | None) -> Markup:
    """An element. In an attribute's name `_` stands for `-`, and one at its end is dropped, as in `class_`.

    None and False leave the attribute out, True writes its name only.
    """
    shown = "".join(_attribute(key, value) for key, value in attributes.items())
    return Markup(f"<{name}{shown}>{join(*parts)}</{name}>")


def number(value: float) -> Markup:
    """A coordinate: at most one digit behind the point."""
    return Markup(f"{value:.1f}".removesuffix(".0"))


def _attribute(key: str, value: Part | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    if isinstance(value, float):
        value = number(value)
    return f' {name}="{escape(value)}"'
