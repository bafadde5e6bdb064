"""The tutorial's training in miniature, without torch: the ranks of one world meet at the master and add up their numbers."""

import argparse
import os
import socket
import sys


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--world_size", type=int, default=2)
    parser.add_argument("--models")
    arguments = parser.parse_args()
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    ranks = range(arguments.offset, arguments.offset + arguments.size)
    if arguments.offset:
        with socket.create_connection(address, timeout=30) as link:
            link.sendall(("".join(f"{rank}\n" for rank in ranks)).encode())
            print("worker sent", list(ranks), flush=True)
        return
    seen = set(ranks)
    with socket.create_server(address) as server:
        server.settimeout(30)
        while len(seen) < arguments.world_size:
            link, _ = server.accept()
            with link:
                seen |= {int(line) for line in link.makefile() if line.strip()}
    if sorted(seen) != list(range(arguments.world_size)):
        sys.exit(f"ranks {sorted(seen)}")
    with open(os.path.join(arguments.models, "model.txt"), "w") as file:
        file.write(f"world of {arguments.world_size}\n")
    print("sum of ranks", sum(seen), flush=True)


if __name__ == "__main__":
    main()
