"""Requests without retries."""

import aiohttp


async def post(url, payload):
    async with aiohttp.ClientSession() as session, session.post(url, json=payload) as reply:
        reply.raise_for_status()
        return await reply.json()


async def get(url):
    async with aiohttp.ClientSession() as session, session.get(url) as reply:
        reply.raise_for_status()
        return await reply.json()
