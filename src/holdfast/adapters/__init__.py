"""The built-in effects as plain functions. `app.builtin_effects` declares them for users.

    address_guard       the allow-list of a request: names, ports, addresses (SSRF protection)
    pinned_connection   a connection to an address that the guard has checked, and a bounded body
    http                any request, guarded
    llm                 chat with any OpenAI-compatible endpoint
    email               a mail: its headers and text, checked
    header_fields       header fields of a mail: encoded words, folding, comparison
    smtp                the session with a mail server
    tmux                panes: finding, reading, typing
    pane_prompter       a prompt in a pane, typed once, submitted and confirmed
    dispatch_protocol   the same, with its record in the dispatch log

Extras are imported inside functions. A missing extra raises `NotInstalled` with the install
command.
"""
