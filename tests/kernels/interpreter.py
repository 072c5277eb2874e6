"""Triton's interpreter (TRITON_INTERPRET=1) under numpy 2.4 and later: int() no longer takes an array of one."""

from __future__ import annotations


def repair() -> None:
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor
