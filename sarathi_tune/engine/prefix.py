"""The prefix cache: pages whose K and V are computed, found again by the tokens they hold.

A page is one node of a chain: its tokens and the node before it. Nodes are found by hash and accepted only when the
tokens are the same and the chain before is the same, so that a hash collision can't hand out another prompt's K and V.
Only full and computed pages are published. A cached page that nobody uses stays until its room is needed; the page
unused for longest goes first, and of one prompt the last page first, so that no chain loses its beginning.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

TokenHash = Callable[[int, tuple[int, ...]], int]


def chain_hash(parent_hash: int, tokens: tuple[int, ...]) -> int:
    """The hash of a page, given the hash of the page before it."""
    return hash((parent_hash, tokens))


@dataclass(slots=True, eq=False)
class _Node:
    page: int
    tokens: tuple[int, ...]
    parent: "_Node | None"
    key: int


@dataclass(slots=True)
class Chain:
    """How far the tokens of a request are in the cache: the page of each node from the first on."""

    pages: list[int] = field(default_factory=list)
    node: _Node | None = None


class PrefixCache:
    """Which pages hold which tokens. Knows no owners: the queue tells when a page is used and when it is idle."""

    def __init__(self, page_tokens: int, token_hash: TokenHash = chain_hash) -> None:
        self.page_tokens = page_tokens
        self._hash = token_hash
        self._buckets: dict[int, list[_Node]] = {}
        self._by_page: dict[int, _Node] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Cached pages that nobody uses: they can be taken when room is needed."""
        return len(self._idle)

    def idle_pages(self) -> list[int]:
        """The pages behind `num_idle`, the one to go first in front."""
        return list(self._idle)

    def is_idle(self, page: int) -> bool:
        """Whether the page is cached and unused."""
        return page in self._idle

    def holds(self, page: int) -> bool:
        """Whether the page is published."""
        return page in self._by_page

    def match(self, tokens: Sequence[int]) -> Chain:
        """The longest cached prefix of `tokens`, in whole pages.

        The last token is never taken from the cache: something must be computed to sample from.
        """
        chain = Chain()
        for start in range(0, (len(tokens) - 1) // self.page_tokens * self.page_tokens, self.page_tokens):
            node = self._find(chain.node, tuple(tokens[start : start + self.page_tokens]))
            if node is None:
                break
            chain.pages.append(node.page)
            chain.node = node
        return chain

    def publish(self, chain: Chain, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Publish the full pages of a request behind `chain`, which is carried on; `tokens` are the computed ones.

        A page whose content another page already offers isn't published twice: the chain goes on over the other page.
        """
        size = self.page_tokens
        for index in range(len(chain.pages), len(tokens) // size):
            content = tuple(tokens[index * size : (index + 1) * size])
            chain.node = self._find(chain.node, content) or self._insert(chain.node, content, pages[index])
            chain.pages.append(chain.node.page)

    def use(self, page: int) -> None:
        """A cached page has an owner again."""
        self._idle.pop(page, None)

    def rest(self, page: int) -> None:
        """A cached page has lost its last owner; it becomes the one used last."""
        assert page in self._by_page, f"page {page} is not cached"
        self._idle[page] = None

    def evict(self) -> int:
        """Forget the cached page that was unused for longest and return it."""
        page, _ = self._idle.popitem(last=False)
        node = self._by_page.pop(page)
        bucket = self._buckets[node.key]
        bucket.remove(node)
        if not bucket:
            del self._buckets[node.key]
        return page

    def _find(self, parent: _Node | None, tokens: tuple[int, ...]) -> _Node | None:
        for node in self._buckets.get(self._key(parent, tokens), ()):
            if node.parent is parent and node.tokens == tokens:
                return node
        return None

    def _insert(self, parent: _Node | None, tokens: tuple[int, ...], page: int) -> _Node:
        node = _Node(page, tokens, parent, self._key(parent, tokens))
        self._buckets.setdefault(node.key, []).append(node)
        self._by_page[page] = node
        return node

    def _key(self, parent: _Node | None, tokens: tuple[int, ...]) -> int:
        return self._hash(parent.key if parent else 0, tokens)
