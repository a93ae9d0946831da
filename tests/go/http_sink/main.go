// http_sink answers 200 to everything: what benchmarks of nsq to-http and nsq_to_http send to.
// It prints its address, and at the end of its input how many requests and connections there were.
package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync/atomic"
)

func main() {
	var requests, connections int64
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	server := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			atomic.AddInt64(&requests, 1)
			io.WriteString(w, "ok")
		}),
		ConnState: func(_ net.Conn, state http.ConnState) {
			if state == http.StateNew {
				atomic.AddInt64(&connections, 1)
			}
		},
	}
	fmt.Println(listener.Addr())
	go server.Serve(listener)
	io.Copy(io.Discard, os.Stdin)
	fmt.Println(atomic.LoadInt64(&requests), atomic.LoadInt64(&connections))
}
