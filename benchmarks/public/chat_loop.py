"""A harness of the verifiers library that asks the model in this process: no program to start for each attempt."""

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
        """One reply to all that was said so far."""
        system, prompt = self.resolve_prompt(data)
        said = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or ())
        messages = [*([vf.SystemMessage(content=system)] if system else []), *said]
        # Plain HTTP on loopback: reading certificates for each reply would be half of what an attempt costs.
        connections = DefaultAsyncHttpxClient(trust_env=False, verify=False)
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=connections, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=[message_to_wire(one) for one in messages])
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["ChatLoop"]
