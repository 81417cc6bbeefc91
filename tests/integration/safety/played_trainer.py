"""The trainer's socket in a process of its own, without Megatron: `played_trainer.py ADDRESS [KEYS_FILE]`."""

import sys
from pathlib import Path

from flexfloor.training import messages as m
from flexfloor.training.command_socket import CommandSocket
from flexfloor.training.keys import read_keys

INFO = m.TrainerInfo(num_params=1, num_ranks=1, dp_size=1, context_tokens=1, vocab_size=1, num_steps=0)


def main() -> None:
    keys = read_keys(Path(sys.argv[2])) if len(sys.argv) > 2 else None
    socket = CommandSocket(sys.argv[1], keys)
    while True:
        address, _, request = socket.receive()
        if isinstance(request, m.ShutdownMsg):
            socket.answer(address, None)
            return
        # Anything but a question would change a real trainer.
        assert isinstance(request, m.InfoMsg), request
        socket.answer(address, INFO)


if __name__ == "__main__":
    main()
