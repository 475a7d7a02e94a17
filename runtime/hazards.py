"""What must come before an operation for the memory that it reads and writes: RAW, WAW and WAR hazards."""

from __future__ import annotations

from collections import defaultdict

from taccl.runtime.plan import Range

Cell = tuple[str, int]


class Hazards:
    """Which operations must come before one, for the memory that it reads and writes."""

    def __init__(self, inplace: tuple[int, int] | None) -> None:
        # In place, chunks of "i" and "o" are cells of one memory, so that hazards between the two are seen.
        self.base = {letter: (letter, 0) for letter in "iostf"}
        if inplace is not None:
            self.base |= {"i": ("io", inplace[0]), "o": ("io", inplace[1])}
        self.writer: dict[Cell, int] = {}
        self.readers: defaultdict[Cell, list[int]] = defaultdict(list)

    def cells(self, extent: Range | None) -> list[Cell]:
        """Of a range, one for each chunk."""
        if extent is None:
            return []
        buffer, first = self.base[extent[0]]
        return [(buffer, first + extent[1] + i) for i in range(extent[2])]

    def before(self, dst: Range | None, *reads: Range | None) -> set[int]:
        """The operations that wrote what is read or overwritten, and that still read what is overwritten."""
        found: set[int] = set()
        for extent in reads:
            for cell in self.cells(extent):
                if cell in self.writer:
                    found.add(self.writer[cell])
        for cell in self.cells(dst):
            if cell in self.writer:
                found.add(self.writer[cell])
            found.update(self.readers.get(cell, ()))
        return found

    def record(self, index: int, dst: Range | None, *reads: Range | None) -> None:
        """The operation comes next."""
        for extent in reads:
            for cell in self.cells(extent):
                self.readers[cell].append(index)
        for cell in self.cells(dst):
            self.writer[cell] = index
            self.readers.pop(cell, None)
