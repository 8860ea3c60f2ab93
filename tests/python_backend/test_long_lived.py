"""`python_backend.long_lived`: what imports create is never examined by the garbage collector, what follows is."""

import gc

from python_backend.long_lived import long_lived_imports


def test_objects_of_the_context_are_never_collected_and_later_ones_are():
    before = gc.get_freeze_count()
    try:
        with long_lived_imports():
            assert not gc.isenabled()
            lasting: list[object] = []
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
        tracked = gc.get_objects()
        assert not any(item is lasting for item in tracked)
        later: list[object] = []
        assert any(item is later for item in gc.get_objects())
    finally:
        gc.unfreeze()
