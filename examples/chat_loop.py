"""A harness of the verifiers library that calls the model in this process instead of starting a program."""

import verifiers.v1 as vf
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from verifiers.v1.dialects.chat import message_to_wire


class ChatLoop(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Ask for one reply to the prompt."""
        system, prompt = self.resolve_prompt(data)
        given = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or ())
        messages = [*([vf.SystemMessage(content=system)] if system else []), *given]
        # Plain HTTP on loopback: loading certificates for each reply would take half of an attempt's time.
        connections = DefaultAsyncHttpxClient(trust_env=False, verify=False)
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=connections, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=[message_to_wire(one) for one in messages])
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["ChatLoop"]
