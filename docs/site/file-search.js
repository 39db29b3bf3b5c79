// The search runs in a worker. Browsers refuse workers to pages that are opened as files; there a frame runs the script.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = Object.assign(document.createElement("iframe"), { hidden: true });
      this.scope = document.body.appendChild(frame).contentWindow;
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = Object.assign(this.scope.document.createElement("script"), { src: url });
      this.loaded = new Promise((resolve) => script.addEventListener("load", resolve));
      this.scope.document.head.append(script);
    }
    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
