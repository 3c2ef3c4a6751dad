"""A process that commits entries in a loop, to be killed.  Prints the name of each shard after."""

import sys
from pathlib import Path

from cache_shards import WIDE, entries, made

from enginecast.cache.store.claims import claim
from enginecast.cache.store.index import open_index
from enginecast.cache.store.shard import shard_name

CHUNK = 4


def main(root: Path, chunks: int) -> None:
    encodings = made(root, WIDE)
    index = open_index(encodings)
    print("ready", flush=True)
    for number in range(chunks):
        wanted = entries(range(number * CHUNK, (number + 1) * CHUNK), WIDE)
        with claim(encodings, shard_name([one.key for one in wanted])) as ours:
            if not ours:
                continue
            index = open_index(encodings, index)
            if (index.find_all([one.key for one in wanted]) < 0).any():
                print(encodings.commit(wanted).name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
