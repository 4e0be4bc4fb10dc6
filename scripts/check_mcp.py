"""The official MCP client lists and calls our tools over both transports, in the newest revision and with a handshake."""

import asyncio
import json
import sys

from mcp import Client, StdioServerParameters

TOOLS = {"memory_store", "memory_query", "outbox_status", "outbox_requeue", "reliability_report", "reconcile"}


async def use(server, mode, name):
    async with Client(server, mode=mode) as client:
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == TOOLS, tools
        assert all(tool.description and tool.input_schema["type"] == "object" for tool in tools)
        text = f"remembered by {name}"
        stored = await client.call_tool("memory_store", {"payload_md": text, "target_space": "team:check"})
        assert not stored.is_error and stored.structured_content["action"] == "allow", stored
        assert json.loads(stored.content[0].text) == stored.structured_content
        found = await client.call_tool("memory_query", {"query": name, "spaces": ["team:check"]})
        assert text in [result["content"] for result in found.structured_content["results"]], found
        refused = await client.call_tool("memory_store", {"payload_md": ""})
        assert refused.is_error, refused
        print(f"{name}: listed and called")


async def main(postrider, url):
    stdio = StdioServerParameters(command=postrider, args=["mcp"])
    for mode in ["auto", "legacy"]:
        await use(url, mode, f"python-http-{mode}")
        await use(stdio, mode, f"python-stdio-{mode}")


asyncio.run(main(*sys.argv[1:]))
