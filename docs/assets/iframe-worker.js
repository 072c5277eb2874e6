// Search runs in a worker, and browsers start no worker for a page that was opened from the disk. There, and only
// there, a hidden frame takes its place: it loads the worker's script and hands messages on.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.ready = new Promise(resolve => (this.frame.onload = resolve))
      const name = "worker" + Math.random().toString(36).slice(2)
      window[name] = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      // importScripts has to wait here: scripts are put one after the other, and each is waited for.
      this.frame.srcdoc = `<base href="${document.baseURI}"><script>
        postMessage = data => parent["${name}"](data)
        importScripts = (...urls) => urls.reduce((done, url) => done.then(() => new Promise((resolve, reject) => {
          const script = document.createElement("script")
          script.src = url; script.onload = resolve; script.onerror = reject
          document.body.appendChild(script)
        })), Promise.resolve())
      <\/script><body><script src="${url}"><\/script>`
      document.body.appendChild(this.frame)
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
