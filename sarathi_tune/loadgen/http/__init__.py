"""The load generator over HTTP: any OpenAI-compatible server, stamped at the socket and read afterwards.

target    which server: base URL, API key
openai    what is sent: request bodies and the dialect that a server understands
probe     one small request before the load: is it there, what does it accept, in one clear sentence if not
wire      the socket: every read stamped at arrival, nothing parsed
framing   where a response body ends
sse       bytes to events
reading   events to tokens: what counts as the first, what as an error
template  events that are like one before, which need no decoding
client    a run in one process: absolute times, one row per request
worker    the same over several processes
"""
