"""Services across the wall: a model endpoint of this machine for code inside, and a server inside for this machine.

sudo dsec up && sudo python examples/services.py
"""

import asyncio
import json

import aiohttp
from aiohttp import web

from dsec import DSecClient, DSecContainerRunArgs

AGENT = """
import http.server, json, urllib.request

def ask(question):
    body = json.dumps({"messages": [{"role": "user", "content": question}]}).encode()
    with urllib.request.urlopen("http://model/v1/chat/completions", body) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

class Agent(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        answer = ask(self.rfile.read(int(self.headers["Content-Length"])).decode()).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

server = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Agent)
print("ready", flush=True)
server.serve_forever()
"""


async def chat(request: web.Request) -> web.Response:
    """Stands for a model that runs on this machine."""
    question = json.loads(await request.read())["messages"][-1]["content"]
    answer = {"role": "assistant", "content": f"{question[::-1]}, says the model"}
    return web.json_response({"choices": [{"index": 0, "message": answer}]})


async def main() -> None:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"

    args = DSecContainerRunArgs(container_image="debian@12")
    async with DSecClient() as client, client.run_container(args) as sandbox:
        async with sandbox.expose(endpoint, name="model") as inside:
            print("the model is", inside, "in there")
            agent = await sandbox.start(["python3", "-c", AGENT])
            await anext(aiter(agent.events()))  # it is ready
            async with sandbox.forward(8000) as url, aiohttp.ClientSession() as session:
                async with session.post(url, data="stressed") as answer:
                    print("the agent answers:", await answer.text())
        gone = await sandbox.run_shell("getent hosts model || echo the name is gone")
        print(gone.text, end="")
    await runner.cleanup()


asyncio.run(main())
