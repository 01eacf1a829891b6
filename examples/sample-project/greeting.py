"""Says hello."""


def greet(name: str) -> str:
    """A greeting for one person."""
    if not name.strip():
        raise ValueError("a name is needed")
    return f"Hello, {name.strip()}!"
