"""Queues of a guild: an order is split among the members, put together, and goes on to the queue that its kind names.

Run workers:             mtask-worker examples.guild_queues:app
Order and follow:        python -m examples.guild_queues

Both find MongoDB by MTASK_URI. `mtask find --lookup user=ann` shows all tasks for a user.
"""

from __future__ import annotations

from mtask import App, Child, Client, Context, Flow, Task

app = App()


@app.task(queue="orders", lookup=["user"])
async def split(context: Context, user: str, pieces: int) -> None:
    """Add a child for each piece. The step that depends on this one waits for the children, too."""
    made = [Child(f"piece-{n}", forge, {"user": user, "piece": n}) for n in range(pieces)]
    await context.add_children(made)


@app.task(queue="forge", lookup=["user"])
def forge(user: str, piece: int) -> str:
    """Make one piece."""
    return f"piece {piece} for {user}"


# The kind of an order is the first part of its flow's key. It names the next queue; a "draft" goes nowhere.
@app.task(queue="assembly", lookup=["user"], next={"sword": "ship", "gift": "wrap"})
async def assemble(context: Context, user: str) -> list[str]:
    """Put together what the members have made."""
    return sorted([piece async for _, piece in context.results() if piece])


@app.task(queue="wrapping")
async def wrap(context: Context, user: str) -> str:
    """Wrap a gift. `context.results()` holds what the task before returned, by its name."""
    return f"{user} gets {len((await context.results())['assemble'])} wrapped pieces"


@app.task(queue="shipping")
async def ship(context: Context, user: str) -> str:
    """Ship a sword."""
    return f"{user} gets a sword of {', '.join((await context.results())['assemble'])}"


def order(client: Client, key: str, user: str, pieces: int) -> None:
    """Publish an order: its first step adds the pieces, and its last one goes on by the kind of the order."""
    flow = Flow(key)
    parts = flow.add("split", split, {"user": user, "pieces": pieces})
    flow.add("whole", assemble, {"user": user}, after=[parts])
    client.publish_flow(flow)


def main() -> None:
    """Order while the guild is closed, show a user's place in the queue, open the guild, and show what became of it."""
    orders = {"sword/1": ("ann", 2), "gift/2": ("bob", 3), "draft/3": ("ann", 1)}
    with Client() as client:
        client.pause(queue="orders")
        for key, (user, pieces) in orders.items():
            order(client, key, user, pieces)
        print(f"orders before draft/3: {client.position(split, 'draft/3/split').ahead}")
        client.resume(queue="orders")
        for name, key in (("ship", "sword/1/whole/next-1"), ("wrap", "gift/2/whole/next-1")):
            print(client.result(assemble, key.removesuffix("/next-1"), timeout=60), "->", name)
            print(wait_for(client, name, key).returns)
        print(client.result(assemble, "draft/3/whole", timeout=60))
        for task in reversed(client.find(lookup={"user": "ann"})):
            print(task.id, task.status)


def wait_for(client: Client, name: str, key: str) -> Task:
    """Wait until a next task, which may not be published yet, has ended."""
    with client.events(name=name, key=key) as happening:
        if not client.find(name=name, key=key):
            next(happening)
        return client.wait(name, key, timeout=60)


if __name__ == "__main__":
    main()
