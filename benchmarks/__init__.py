"""The measurements behind the README's numbers."""
