"""An effect that happens exactly once: what the handler writes and the task's SUCCESS commit in one transaction.

Run a worker: mtask-worker examples.transaction:app
Publish:      python -m examples.transaction

Both find MongoDB by MTASK_URI. The accounts are kept in the database SHOP_DATABASE, "shop" by default.
"""

from __future__ import annotations

import os

from mtask import App, Client, Context, Fail

SHOP = os.environ.get("SHOP_DATABASE", "shop")
app = App()


@app.task
async def transfer(context: Context, source: str, target: str, amount: int) -> None:
    """Move money. However often a worker dies on the way, it moves once, or not at all."""
    async with context.transaction() as session:
        accounts = session.client[SHOP]["accounts"]
        enough = {"_id": source, "balance": {"$gte": amount}}
        paid = await accounts.update_one(enough, {"$inc": {"balance": -amount}}, session=session)
        await accounts.update_one({"_id": target}, {"$inc": {"balance": amount}}, upsert=True, session=session)
        if not paid.matched_count:
            raise Fail(f"{source} has less than {amount}")  # undoes both writes; the task is not tried again


def main() -> None:
    """Open an account, move some of it twice under one key, then more than there is."""
    with Client() as client:
        accounts = client.tasks.database.client[SHOP]["accounts"]
        accounts.update_one({"_id": "ada"}, {"$set": {"balance": 100}}, upsert=True)
        accounts.update_one({"_id": "bob"}, {"$set": {"balance": 0}}, upsert=True)
        for _ in range(2):
            client.publish(transfer, {"source": "ada", "target": "bob", "amount": 30}, key="rent/march")
        client.publish(transfer, {"source": "ada", "target": "bob", "amount": 1000}, key="rent/april")
        print("rent/march", client.wait(transfer, "rent/march", timeout=60).status)
        refused = client.wait(transfer, "rent/april", timeout=60)
        print("rent/april", refused.status, refused.fail_reason)
        print({account["_id"]: account["balance"] for account in accounts.find().sort("_id")})


if __name__ == "__main__":
    main()
