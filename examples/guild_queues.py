"""Queues of a guild: an order is split among the members, put together, and goes on to the queue that its kind names.

Run workers:             mtask-worker examples.guild_queues:app
Order and follow:        python -m examples.guild_queues

Both find MongoDB by MTASK_URI. `mtask find --lookup user=ann` shows all tasks for a user.
"""

from mtask import App, Child, Client, Context, Flow

app = App()


@app.task(queue="orders", lookup=["user"])
async def split(context: Context, user: str, pieces: int) -> None:
    """Add a child for each piece. The step that depends on this one waits for the children, too."""
    await context.add_children([Child(f"piece-{n}", forge, {"user": user, "piece": n}) for n in range(pieces)])


@app.task(queue="forge", lookup=["user"])
def forge(user: str, piece: int) -> str:
    return f"piece {piece} for {user}"


# The kind of an order is the first part of its flow's key. It names the next task; a "draft" goes nowhere.
@app.task(queue="assembly", lookup=["user"], next={"sword": "ship", "gift": "wrap"})
async def assemble(context: Context, user: str) -> list[str]:
    return sorted([piece async for _, piece in context.results() if piece])


@app.task(queue="wrapping")
async def wrap(context: Context, user: str) -> str:
    return f"{user} gets {len((await context.results())['assemble'])} wrapped pieces"  # what the task before returned


@app.task(queue="shipping")
async def ship(context: Context, user: str) -> str:
    return f"{user} gets a sword of {', '.join((await context.results())['assemble'])}"


def main() -> None:
    """Order while the guild is closed, show a user's place in the queue, open the guild, and show what became of it."""
    orders = {"sword/1": ("ann", 2), "gift/2": ("bob", 3), "draft/3": ("ann", 1)}
    with Client() as client:
        client.pause(queue="orders")
        for key, (user, pieces) in orders.items():
            flow = Flow(key)
            parts = flow.add("split", split, {"user": user, "pieces": pieces})
            flow.add("whole", assemble, {"user": user}, after=[parts])
            client.publish_flow(flow)
        print(f"orders before draft/3: {client.position(split, 'draft/3/split').ahead}")
        client.resume(queue="orders")
        for key in orders:
            client.wait_flow(key, timeout=60)
        for task in reversed(client.find(lookup={"user": ["ann", "bob"]}, name=["assemble", "ship", "wrap"])):
            print(task.id, task.status, task.returns)


if __name__ == "__main__":
    main()
