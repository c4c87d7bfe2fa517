"""The built-in effects: `hf.http.request`, `hf.llm.chat`, `hf.email.send`, `hf.agent.dispatch`.

Each module has an effect that is configured by the environment of the performing process, and
`declare`, which creates the same effect with an explicit configuration. `adapters` implements them.
"""
