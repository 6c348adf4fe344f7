"""Judge a state that is carried from one piece of a recording to the next."""

from evals_grading import Work, assert_close, guard, peak_bytes, point


def losses(pieces):
    from stream import train

    return train(pieces)


def required(pieces):
    """Train on the untouched model, with a state that is carried on without its graph."""
    import torch
    from stream import Reader, recording

    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    found, state = [], None
    for piece, following in recording(pieces):
        outputs, state = model(piece, state)
        state = [one.detach() for one in state]
        loss = (outputs - following).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def peak(pieces):
    from stream import train

    return peak_bytes(lambda: train(pieces))


@point(1)
def runs(work: Work) -> None:
    """Training ends over six pieces."""
    assert len(work.call(losses, 6)) == 6


@point(4)
def state_is_carried(work: Work) -> None:
    """The losses are those with the state carried on and gradients within the piece."""
    assert_close(work.call(losses, 6), work.original(required, 6), within=1e-6)


@guard(2)
def memory_is_constant(work: Work) -> None:
    """Twelve pieces need at most 1.2 times the memory of three, without the recording."""
    recording = 4 * 6 * 4 * 12 * 9 * 3  # bytes of nine more pieces, and of what they were made from
    grown = work.call(peak, 12) - recording
    assert grown <= 1.2 * work.call(peak, 3), "memory grows with the number of pieces"
