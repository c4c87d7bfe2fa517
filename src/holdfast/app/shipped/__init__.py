"""The shipped effects, as users see them: `hf.http.request`, `hf.llm.chat`, `hf.email.send`,
`hf.agent.dispatch`.

Each module has the effect, configured by the environment of the process that performs it, and
`declare`, which makes the same effect with a configuration of yours. What they do is in `adapters`.
"""
