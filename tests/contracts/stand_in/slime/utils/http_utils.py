"""Requests without retries; an answer that is not JSON comes as text."""

import aiohttp


async def post(url, payload):
    async with aiohttp.ClientSession() as session, session.post(url, json=payload) as reply:
        reply.raise_for_status()
        is_json = reply.content_type == "application/json"
        return await (reply.json() if is_json else reply.text())


async def get(url):
    async with aiohttp.ClientSession() as session, session.get(url) as reply:
        reply.raise_for_status()
        return await reply.json()
