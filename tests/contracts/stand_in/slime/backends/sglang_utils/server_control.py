"""The end of a rollout: abort what runs, until the server's load says that nothing does."""

import asyncio

from slime.utils.http_utils import get, post

NUM_TRIES = 5


async def abort_servers_until_idle(urls):
    for url in urls:
        for _ in range(NUM_TRIES):
            await post(f"{url}/abort_request", {"abort_all": True})
            loads = (await get(f"{url}/v1/loads?include=core"))["loads"]
            if sum(load.get("num_reqs", load.get("num_total_reqs", 0)) for load in loads) == 0:
                break
            await asyncio.sleep(0)
        else:
            raise TimeoutError(f"{url} does not become idle")
