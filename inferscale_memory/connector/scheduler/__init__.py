"""The scheduler side of the connector: it decides what is injected, captured and forgotten. No code here sees a tensor.

side                 passes each of vLLM's calls to the part that answers it
admission            checks what a request asks for when it arrives
inject               claims prompt tokens and plans their loads
encode               finds room for new blobs and plans their captures
forget               drops blobs, and cached blocks that contain their facts
prefix_cache_index   which blocks of vLLM's prefix cache were computed from which facts
running              which unfinished requests contain which facts
requests             the state of each request
receipts             replies for clients that ask for them later
blocks               from prompt positions to slots of the paged cache
"""
